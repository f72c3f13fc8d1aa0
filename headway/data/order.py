"""The order of rows: another one in every epoch, the same on every machine for the same seed.

The permutation sorts raw draws of PCG64, seeded by (seed, epoch). NumPy keeps raw streams the same over its versions
(not so `Generator.permutation`), and a stable sort has one result: a run resumes on another machine and another NumPy.
"""

import numpy as np
from numpy.typing import NDArray


def epoch_order(num_rows: int, seed: int, epoch: int, *, shuffle: bool) -> NDArray[np.int64]:
    """[num_rows] positions in the order of this epoch.

    Example:
        >>> epoch_order(5, seed=1, epoch=0, shuffle=False).tolist()
        [0, 1, 2, 3, 4]
        >>> sorted(epoch_order(5, seed=1, epoch=3, shuffle=True).tolist())
        [0, 1, 2, 3, 4]
    """
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    draws = np.random.PCG64([seed & (2**64 - 1), epoch]).random_raw(num_rows)
    return np.argsort(draws, kind="stable").astype(np.int64)
