"""Fill tensors whose values are computed from a file, several tensors at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from weighin.loader.fill import Fill, cache_threads, one_thread_each
from weighin.loader.reads import Fillable


def split(fills: Sequence[Fillable]) -> tuple[list[Fillable], list[Fill]]:
    """Return the tensors whose bytes are in a file, and those whose values are computed."""
    plain: list[Fillable] = []
    computed: list[Fill] = []
    for one in fills:
        if isinstance(one, Fill) and one.source.fill:
            computed.append(one)
        else:
            plain.append(one)
    return plain, computed


def fill_all(fills: Sequence[Fill], threads: int | None) -> None:
    """Compute the values of all tensors in their memory; the first error ends the load.

    Args:
        threads: the number of threads, at most one for each processor; each needs a few MiB.
    """
    most = min(threads or cache_threads(), cache_threads())
    largest_first = sorted(fills, key=lambda one: one.memory.nbytes, reverse=True)
    with one_thread_each, ThreadPoolExecutor(most) as pool:
        futures = [pool.submit(_fill, one) for one in largest_first]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _fill(one: Fill) -> None:
    assert one.source.fill
    one.source.fill(one.memory)
