"""ACC and BWT of the paper, from the matrix R of test accuracies: R[i, j] is on task j after learning task i."""

from torch import Tensor


def acc(accuracies: Tensor) -> float:
    """Average accuracy on all tasks after the last one. accuracies: [T, T]."""
    return float(accuracies[-1].mean())


def bwt(accuracies: Tensor) -> float:
    """Backward transfer: how much the accuracy on earlier tasks moved since each was learned; negative is forgetting.

    accuracies: [T, T] with T of at least 2, since the last task has had no time to be forgotten.
    """
    if len(accuracies) < 2:
        raise ValueError("BWT needs at least two tasks")
    return float((accuracies[-1] - accuracies.diagonal())[:-1].mean())
