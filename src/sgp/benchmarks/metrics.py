"""ACC, BWT and relative FWT, from a matrix R of test accuracies: R[i, j] is that of task j after training task i."""

from torch import Tensor


def acc(accuracies: Tensor) -> float:
    """Compute the average accuracy on all tasks after the last task. accuracies: [T, T]."""
    return float(accuracies[-1].mean())


def bwt(accuracies: Tensor) -> float:
    """Compute backward transfer: the mean change of the accuracy on each earlier task since it was learned.

    A negative value is forgetting. accuracies: [T, T] with T of at least 2, since the last task cannot be forgotten.
    """
    if len(accuracies) < 2:
        raise ValueError("BWT needs at least two tasks")
    return float((accuracies[-1] - accuracies.diagonal())[:-1].mean())


def relative_fwt(accuracies: Tensor, others: Tensor) -> float:
    """Compute the forward transfer of one method relative to another: the mean difference of R[i, i].

    accuracies and others: [T, T].
    """
    if len(accuracies) != len(others):
        raise ValueError(f"FWT compares runs of equally many tasks, got {len(accuracies)} and {len(others)}")
    return float((accuracies - others).diagonal().mean())
