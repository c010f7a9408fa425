"""Fill tensors whose values are computed from a file, several tensors at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from weighin.formats.converted import Converted
from weighin.loader.fill import Fill, cache_threads, one_thread_each
from weighin.loader.reads import Fillable


def split(fills: Sequence[Fillable]) -> tuple[list[Fillable], list[Fill]]:
    """Return the tensors whose bytes are in a file, and those whose values are computed."""
    plain: list[Fillable] = []
    converted: list[Fill] = []
    for one in fills:
        if isinstance(one, Fill) and isinstance(one.source, Converted):
            converted.append(one)
        else:
            plain.append(one)
    return plain, converted


def fill_all(fills: Sequence[Fill], threads: int | None) -> None:
    """Compute the values of all tensors in their memory; the first error ends the load.

    Args:
        threads: the number of threads, at most one for each processor; each needs a few MiB.
    """
    most = min(threads or cache_threads(), cache_threads())
    with one_thread_each, ThreadPoolExecutor(most) as pool:
        futures = [pool.submit(_fill, one) for one in sorted(fills, key=_bytes, reverse=True)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _fill(one: Fill) -> None:
    assert isinstance(one.source, Converted)
    one.source.fill(one.memory)


def _bytes(one: Fill) -> int:
    return one.memory.nbytes
