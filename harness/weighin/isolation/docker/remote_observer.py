"""Observe a worker through weighin's watcher process in its container (``container_observer``)."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weighin.isolation.base import Channel
from weighin.probes.observer import Observation
from weighin.protocol import decode_event
from weighin.result import Memory, Sample

_TURN_S = 0.01  # between two looks at the channel: the longest delay of a request
_ANSWER_TIMEOUT_S = 10.0


class InsideObserver:
    """Observes a worker through the watcher: a process in its container that ``channel`` reaches.

    When the watcher has died, every measured value is None and every action returns False.
    """

    def __init__(self, channel: Channel, lift: Callable[[], None]) -> None:
        """``lift`` asks the Docker engine to lift the RAM limit, which the watcher may not do."""
        self._lift, self._is_lifted = lift, False
        self.oom_kills: int | None = None
        self.last_peak_rss_bytes: int | None = None
        self.others = (0, 0)
        self.watcher: Memory | None = None
        self._channel = channel
        self._samples: list[Sample] = []
        self._questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def look(self) -> Observation:
        seen = Observation(**self._ask("look", {}))
        return replace(seen, escape="") if self._is_lifted else seen

    def raise_limit(self) -> None:
        """Ask the engine to lift the limit; later observations do not call this an escape."""
        self._is_lifted = True
        self._lift()

    def reset_peak(self) -> bool:
        return bool(self._ask("reset", False))

    def kill(self) -> bool:
        return bool(self._ask("kill", 0))

    def stop(self) -> list[Sample]:
        end = self._ask("end", {})
        self.oom_kills = end.get("oom_kills")
        self.last_peak_rss_bytes = end.get("last_peak_rss_bytes")
        number, private_bytes = end.get("others", (0, 0))
        self.others = (number, private_bytes)
        self.watcher = Memory(**end["memory"]) if end else None
        self._thread.join(_ANSWER_TIMEOUT_S)
        self._channel.close()
        return self._samples

    def _ask(self, word: str, otherwise: Any) -> Any:
        if not self._thread.is_alive():
            return otherwise
        self._questions.put(f"{word}\n".encode())
        try:
            answer = self._answers.get(timeout=2 * _ANSWER_TIMEOUT_S)
        except queue.Empty:
            return otherwise
        return otherwise if answer is None else answer["answer"]

    def _run(self) -> None:
        asked_s: float | None = None
        try:
            while True:
                if asked_s is None and not self._questions.empty():
                    self._channel.send(self._questions.get())
                    asked_s = time.monotonic()
                try:
                    line = self._channel.receive(_TURN_S)
                except TimeoutError:
                    if asked_s and time.monotonic() - asked_s > _ANSWER_TIMEOUT_S:
                        return
                    continue
                if line is None:
                    return
                if (message := decode_event(line)) is None:
                    continue
                if message["event"] == "samples":
                    self._samples += [Sample(*values) for values in message["answer"]]
                else:
                    self._answers.put(message)
                    asked_s = None
        finally:
            self._answers.put(None)  # release a waiting caller
