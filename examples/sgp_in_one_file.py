"""Scaled Gradient Projection (SGP) in one file of plain torch: tasks of permuted digits, learned one after another.

    python examples/sgp_in_one_file.py    # a few seconds on a CPU; needs torch and scikit-learn

Equation numbers are those of Saha and Roy, "Continual Learning with Scaled Gradient Projection", AAAI 2023. As in the
paper, a representation matrix R is [d, n] with one input per column, the bases M are [d, k], and layers have no biases.
Torch stores a weight and its gradient as [out, d], so they are transposed with respect to the paper.
"""

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TASKS, EPOCHS, BATCH_SIZE, LR = 8, 5, 10, 0.05
THRESHOLD, ALPHA = 0.95, 10.0  # chosen on images held out of the training set, with other seeds

Memory = dict[nn.Linear, tuple[Tensor, Tensor]]  # bases M [d, k] and importances lambda [k] of each layer
Examples = tuple[Tensor, Tensor]  # images [n, 64] and labels [n]


def compute_importance(sigma: Tensor, alpha: float) -> Tensor:
    """Return the importance of each basis from its singular value, Eq. 2; alpha = inf gives 1, which is GPM."""
    if math.isinf(alpha):
        return torch.ones_like(sigma)
    return (alpha + 1) * sigma / (alpha * sigma + sigma.max())


def count_bases(sigma: Tensor, captured: Tensor, energy: Tensor, threshold: float) -> int:
    """Return the smallest number of new bases with which the memory captures enough energy, Eq. 1 and Eq. 5."""
    energies = captured + torch.cat([torch.zeros_like(sigma[:1]), sigma.square()]).cumsum(0)  # with 0, 1, ... bases
    return int((energies < threshold * energy).sum())


def grow_memory(M: Tensor, importance: Tensor, R: Tensor, threshold: float, alpha: float) -> tuple[Tensor, Tensor]:
    """Return bases and importances after one more task with the representation matrix R (Algorithm 1)."""
    k = M.shape[1]  # 0 before the first task, for which Eq. 4 to Eq. 10 reduce to Eq. 1 and Eq. 2
    R_M = M @ M.T @ R
    R_hat = R - R_M  # Eq. 4: the part of R that the old bases do not span
    U_hat, sigma_hat, _ = torch.linalg.svd(R_hat, full_matrices=False)
    new = count_bases(sigma_hat, R_M.square().sum(), R.square().sum(), threshold)  # Eq. 5, for the first task Eq. 1
    U_M, sigma_M, _ = torch.linalg.svd(R_M, full_matrices=False)
    C = M.T @ U_M[:, :k]  # Eq. 6
    surrogate = (C.square() @ sigma_M[:k].square()).sqrt()  # Eq. 7: singular values of the old bases for this task
    sigma = torch.cat([surrogate, sigma_hat[:new]])  # Eq. 8, which satisfies Eq. 9
    importance_task = compute_importance(sigma, alpha)  # Eq. 2
    old = (importance + importance_task[:k]).clamp(max=1)  # Eq. 10
    return torch.cat([M, U_hat[:, :new]], dim=1), torch.cat([old, importance_task[k:]])


def project_gradient(gradient: Tensor, M: Tensor, importance: Tensor) -> Tensor:
    """Return the scaled gradient, Eq. 3. gradient: [out, d]."""
    return gradient - gradient @ M @ importance.diag() @ M.T


@torch.no_grad()
def update_memory(memory: Memory, network: nn.Sequential, x: Tensor, threshold: float, alpha: float) -> None:
    """Add a task to the memory: the columns of a layer's representation matrix R are the inputs that it reads."""
    for layer in network:
        if isinstance(layer, nn.Linear):
            R = x.T
            M, importance = memory.get(layer, (R.new_zeros(len(R), 0), R.new_zeros(0)))
            memory[layer] = grow_memory(M, importance, R, threshold, alpha)
        x = layer(x)


def train_step(network: nn.Sequential, memory: Memory, x: Tensor, y: Tensor, lr: float) -> None:
    """Take one step of plain SGD with the scaled gradient; an empty memory leaves the gradient as it is."""
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    loss = nn.functional.cross_entropy(network(x), y)
    gradients = torch.autograd.grad(loss, [layer.weight for layer in layers])
    with torch.no_grad():
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.weight -= lr * (project_gradient(gradient, *memory[layer]) if layer in memory else gradient)


def build_network(seed: int) -> nn.Sequential:
    """Return a multilayer perceptron without biases; one head serves all tasks and is protected as well."""
    torch.manual_seed(seed)
    first, second, head = (nn.Linear(d, out, bias=False) for d, out in ((64, 100), (100, 100), (100, 10)))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), head).double()


def load_tasks(tasks: int, seed: int) -> list[tuple[Examples, Examples]]:
    """Return training and test examples of each task: all ten digits, with the pixels in an order of the task's own."""
    pixels, classes = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels / 8 - 1), torch.from_numpy(classes)
    is_test = torch.arange(len(x)) % 5 == 0
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(64, generator=generator) for _ in range(tasks)]
    return [((x[~is_test][:, order], y[~is_test]), (x[is_test][:, order], y[is_test])) for order in orders]


@torch.no_grad()
def compute_accuracy(network: nn.Sequential, x: Tensor, y: Tensor) -> float:
    """Return the percentage of examples that the network classifies correctly."""
    return 100 * (network(x).argmax(1) == y).double().mean().item()


def run_method(alpha: float | None, seed: int = 0) -> tuple[float, float]:
    """Learn all tasks in a row and return ACC and BWT in percent; alpha = None is plain finetuning."""
    network, memory = build_network(seed), Memory()
    stream = load_tasks(TASKS, seed)
    learned = []  # R_ii: accuracy on each task right after it was learned
    for (x, y), test in stream:
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(x)).split(BATCH_SIZE):
                train_step(network, memory, x[batch], y[batch], LR)
        if alpha is not None:
            update_memory(memory, network, x, THRESHOLD, alpha)
        learned.append(compute_accuracy(network, *test))
    final = [compute_accuracy(network, *test) for _, test in stream]  # R_Ti
    forgetting = [now - then for now, then in zip(final[:-1], learned[:-1], strict=True)]
    return sum(final) / TASKS, sum(forgetting) / (TASKS - 1)  # ACC and BWT, Eq. 11


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads only wait for each other on matrices as small as these
    print(f"{TASKS} tasks of permuted digits   ACC (%)  BWT (%)")
    for name, alpha in {"finetuning": None, "GPM": math.inf, "SGP": ALPHA}.items():
        print("{:<26}  {:8.1f} {:8.1f}".format(name, *run_method(alpha)))
