"""Explain a command's end and memory use in at most three lines of text, from its record alone."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from weighin.records.explanation.causes import LEAST_BYTES, Cause, find
from weighin.records.explanation.facts import (
    Facts,
    Place,
    grown_by,
    held_by,
    names,
    program,
    size,
    title_of,
)
from weighin.records.run_folder import read_samples
from weighin.result import Outcome, Result, Sample
from weighin.text import few
from weighin.units import MIB

__all__ = ["Cause", "answer", "cause_of", "explain"]

_UNSEEN_SHARE, _UNSEEN_BYTES = 0.1, 8 * MIB  # of the need; a kind of memory was not seen
_NEAR_LIMIT = 0.98  # page cache fills memory up to a limit, so that a peak this near shows no need


def explain(result: Result, samples: Sequence[Sample] | None = None) -> list[str]:
    """Return up to three lines: the command's end, its memory use, and the cause of this use.

    The second line also names the line of code that took most memory. The second line is left out
    if no memory was measured, and the third line if no cause is proven.
    """
    ending = _ending(result)
    if result.ran is None:
        return [ending]
    facts = Facts(result, result.ran, samples or ())
    cause = find(facts)
    where = _where(facts, cause.place if cause else facts.place)
    lines = [ending, " ".join(filter(None, (_need(facts), where, _cache(facts))))]
    if cause:
        lines.append(f"{cause.words} {cause.hint}".strip())
    return [line for line in lines if line]


def answer(run: Path, result: Result) -> list[str]:
    """Return the explanation of a command's result in a run's folder; empty without a command."""
    return explain(result, read_samples(run, result.samples_path)) if result.cell.command else []


def cause_of(result: Result, samples: Sequence[Sample] | None = None) -> Cause | None:
    return find(Facts(result, result.ran, samples or ())) if result.ran else None


def _ending(result: Result) -> str:
    ran, limit = result.ran, result.cell.ram_limit_bytes
    if result.outcome is Outcome.OK:
        text = "The command ended well" + (f" under its limit of {size(limit)}" if limit else "")
    elif result.outcome is Outcome.OOM_KILLED and ran and ran.kills:
        text = _killed(Facts(result, ran))
    else:
        text = result.message[:1].upper() + result.message[1:] or f"Ended: {result.outcome}"
    if ran and ran.ended:
        counts = Counter(map(program, ran.ended)).most_common()
        texts = [f"{command} ({count})" if count > 1 else command for command, count in counts]
        text += f". weighin stopped processes that still ran at the end: {few(texts)}"
    return f"{text}."


def _killed(facts: Facts) -> str:
    """Name the reached limit and the killed processes; say if the first process lived on."""
    kills, victims = facts.ran.kills, []
    for kill in kills[:2]:
        process = facts.process(kill.pid)
        command = (process and process.command) or kill.command
        victims.append(f"{program(command)} (pid {kill.pid})")
    more = max(len(kills), facts.result.oom_kills or 0) - len(victims)
    who = ", ".join(victims) + (f" and {more} more" if more > 0 else "")
    first = ", and the first process lived on" if facts.ran.survived else ""
    if any(kill.is_main for kill in kills):
        first = ", the first process" + " among them" * (len(kills) > 1)
    grower, grew = facts.grower, ""
    if grower and grower.pid not in {kill.pid for kill in kills}:  # it kills what holds most
        grew = f". The process that grew most is {title_of(grower)}, by {size(grown_by(grower))}"
    return f"Killed {_limit(facts)}: the kernel killed {who}{first}{grew}"


def _limit(facts: Facts) -> str:
    own, kills = facts.result.cell.ram_limit_bytes, facts.ran.kills
    if any(kill.limit_of == "machine" for kill in kills):
        return "when the whole machine had no memory left"
    if outer := facts.outer_limit:
        return f"by the {outer}" + (f", not by its own of {size(own)}" if own else "")
    if own and all(not kill.limit_of for kill in kills):
        return f"by the limit of {size(own)}"
    return "for lack of memory"


def _need(facts: Facts) -> str:
    needed = facts.ran.needed_bytes
    if needed is None:
        return ""
    amount = f"{size(needed)} of {_kinds(facts, needed)}"
    if facts.killed:
        return f"The command had {amount}, not counting page cache, and tried to allocate more."
    least = "at least " if facts.ran.needed_is_sampled else ""
    peak, limit = facts.result.peaks.cgroup_bytes, facts.result.cell.ram_limit_bytes
    text = f"The command needs {least}{amount}"
    if peak is None:
        return f"{text}, as sampled."
    freed, cached = facts.at_peak.freed_bytes or 0, facts.result.peaks.file_sampled_bytes
    what = "with page cache"
    if freed >= MIB:
        what = f"with {size(freed)} that it gave back (MADV_FREE)"
    elif peak - needed < MIB or (cached is not None and cached < MIB):
        what = "of its cgroup"
    elif limit and peak >= _NEAR_LIMIT * limit:
        return f"{text}: page cache filled memory up to the limit of {size(peak)}."
    return f"{text}; the peak {what} is {size(peak)}."


def _kinds(facts: Facts, needed: int) -> str:
    """Name the kinds of memory that were read, each with its size if there are several."""
    sizes = {
        "anonymous": max(
            facts.at_peak.anon_bytes, *(kill.anon_bytes or 0 for kill in facts.ran.kills), 0
        ),
        "shared": facts.at_peak.shmem_bytes,
        "locked": facts.locked_bytes,
        "kernel": facts.kernel_bytes,
    }
    sizes["anonymous"] = min(sizes["anonymous"], needed)
    seen = sum(sizes.values())
    least = max(MIB, needed // 100)
    named = {name: number for name, number in sizes.items() if number >= least}
    if not named:
        return "memory"
    *others, last = named
    kinds = f"{', '.join(others)} and {last}" if others else last
    each = " and ".join(map(size, named.values())) if others else ""
    if seen < needed - max(_UNSEEN_SHARE * needed, _UNSEEN_BYTES):
        each = "; ".join(f"{size(number)} {name}" for name, number in named.items())
        return f"memory that the kernel cannot reclaim (samples saw {each})"
    return f"{kinds} memory" + f" ({each})" * bool(each)


def _where(facts: Facts, place: Place | None) -> str:
    """Name the line of code and the process that took most of the memory."""
    holder, by, of = facts.holder, "", ""
    if facts.needed_bytes < LEAST_BYTES and not facts.killed:
        place = None
    if holder and len(facts.present) > 1 and held_by(holder) > facts.held_bytes // 2:
        who = "the first process" if holder.pid == facts.ran.pid else title_of(holder)
        by = f" in {who}"
        if place and place.stack.pid != holder.pid:
            runner = facts.process(place.stack.pid)
            by = f" in {title_of(runner)}" if runner else ""
            of = f"; {who} had {size(held_by(holder))} of it"
    if place:
        return f"Most of this memory was in use when {place.title} ran{by}{of}."
    marks = [mark for mark in facts.ran.marks if mark.t_ns <= (facts.ran.peak_ns or 0)]
    if marks:
        return f"Most of this memory was in use after the command printed {marks[-1].text!r}{by}."
    return f"Most of this memory was{by}." if by else ""


def _cache(facts: Facts) -> str:
    """Name the size of the page cache, its files, and the files that were cold at the start."""
    most, cold = facts.result.peaks.file_sampled_bytes, facts.ran.cold
    if most is not None:  # locked pages can be reclaimed when the program has ended
        most = max(most - facts.locked_bytes, 0)
    found = {file.path: file for process in facts.present for file in process.files}
    files = sorted(found.values(), key=lambda file: -file.size_bytes)
    is_charged = most is not None and most >= MIB
    if facts.result.peaks.cgroup_bytes is None or most is None or not (is_charged or files or cold):
        return ""
    of = f" of {names(files)}" if files and is_charged else ""
    start = (
        f"{', '.join(cold[:2])} cold at the start"
        if cold
        else "pages that other programs had read before are not charged (--cold PATH drops such pages)"
    )
    return f"Page cache: {f'at most {size(most)}{of}' if is_charged else 'none'}; {start}."
