"""ACC, BWT and FWT of the paper, from the matrix R of test accuracies: R[i, j] is on task j after learning task i."""

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


def fwt(accuracies: Tensor, alone: Tensor) -> float:
    """Forward transfer: how much better each task was learned than by a network of its own.

    Args:
        accuracies: [T, T].
        alone: accuracy of a network that was trained on each task alone, [T].
    """
    if alone.shape != accuracies.diagonal().shape:
        raise ValueError(f"there are {len(accuracies)} tasks and {len(alone)} accuracies of networks of their own")
    return float((accuracies.diagonal() - alone).mean())


def relative_fwt(accuracies: Tensor, others: Tensor) -> float:
    """Forward transfer of one method relative to another: the mean difference of R_ii. Both: [T, T]."""
    return fwt(accuracies, others.diagonal())
