"""The paper written out: Saha & Roy, "Continual Learning with Scaled Gradient Projection" (AAAI 2023).

An oracle for the tests, not an implementation: numpy in float64, one function per equation, real SVDs,
diagonal matrices and d x d projectors. The orientation is the paper's: a representation matrix R is [d, n]
with one input per column, M is [d, k], a weight and its gradient are [d, out].

Where the equations are silent:
- a direction whose singular value is rounding error relative to |R| is no direction of R and never becomes
  a basis;
- a representation that is all zero adds no basis and no importance (Eq. 2 would be 0 / 0);
- alpha = inf is the limit of Eq. 2: importance 1.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def equation_1(sigma: Array, energy: float, threshold: float) -> int:
    """Return the smallest k with |R_k|_F^2 >= threshold |R|_F^2. The energy of R_k is that of its singular values.

    sigma: [min(d, n)], descending; energy: |R|_F^2.
    """
    return equation_5(0.0, sigma, energy, threshold)


def equation_2(sigma: Array, alpha: float) -> Array:
    """Compute the importance of each basis from its singular value. sigma: [k] -> [k]."""
    if sigma.size == 0 or sigma.max() == 0:
        return np.zeros_like(sigma)
    if math.isinf(alpha):
        return np.ones_like(sigma)
    importance: Array = (alpha + 1) * sigma / (alpha * sigma + np.max(sigma))
    return importance


def equation_3(gradient: Array, M: Array, importance: Array) -> Array:
    """Compute the scaled gradient: G - (M Lambda M^T) G. gradient: [d, out]."""
    Lambda = np.diag(importance)
    scaled: Array = gradient - (M @ Lambda @ M.T) @ gradient
    return scaled


def equation_4(R: Array, M: Array) -> tuple[Array, Array]:
    """Return the residual of R outside the memory and the part of R inside it: (R_hat, R_M), both [d, n]."""
    R_M = (M @ M.T) @ R
    return R - R_M, R_M


def equation_5(captured: float, sigma_hat: Array, energy: float, threshold: float) -> int:
    """Return the smallest k_tau with |R_M|_F^2 + |(R_hat)_k_tau|_F^2 >= threshold |R|_F^2.

    captured: |R_M|_F^2; sigma_hat: [min(d, n)], singular values of R_hat, descending; energy: |R|_F^2.
    """
    directions = int(np.sum(sigma_hat > compute_rounding(energy)))
    for k in range(directions):
        if captured + np.sum(sigma_hat[:k] ** 2) >= threshold * energy:
            return k
    return directions


def equation_6(M: Array, U_M: Array) -> Array:
    """Compute the projection coefficients C = M^T U_M. M: [d, k], U_M: [d, j] -> [k, j]."""
    C: Array = M.T @ U_M
    return C


def equation_7(C: Array, sigma_M: Array) -> Array:
    """Compute the surrogate singular values of the old bases. C: [k, j], sigma_M: [j] -> [k]."""
    surrogate: Array = np.sqrt((C * C) @ sigma_M**2)
    return surrogate


def equation_8(surrogate: Array, sigma_hat: Array) -> Array:
    """Join the singular values of old and new bases in one vector. [k], [k_tau] -> [k + k_tau]."""
    return np.concatenate([surrogate, sigma_hat])


def equation_9(sigma: Array, energy: float, threshold: float) -> bool:
    """Return whether inequality 5 holds for the concatenated vector of Eq. 8, up to rounding."""
    return bool(np.sum(sigma**2) >= threshold * energy - 1e-12 * energy)


def equation_10(importance: Array, importance_task: Array) -> Array:
    """Accumulate the importance of the old bases over tasks, up to 1. [k], [k] -> [k]."""
    together = importance + importance_task
    return np.where(together >= 1, 1.0, together)


def compute_rounding(energy: float) -> float:
    """Return the singular value below which a direction of R, or of its residual, is rounding error."""
    return 1e-12 * math.sqrt(energy)


def learn_first_task(R: Array, threshold: float, alpha: float) -> tuple[Array, Array]:
    """Compute bases and importances after task 1. R: [d, n] -> M: [d, k_1], importance: [k_1]."""
    U, Sigma, _ = np.linalg.svd(R, full_matrices=False)
    k_1 = equation_1(Sigma, float(np.linalg.norm(R) ** 2), threshold)
    return U[:, :k_1], equation_2(Sigma[:k_1], alpha)


def learn_next_task(M: Array, importance: Array, R: Array, threshold: float, alpha: float) -> tuple[Array, Array]:
    """Compute bases and importances after one more task: the inner loop of Algorithm 1 over layers.

    M: [d, k], importance: [k], R: [d, n] -> M: [d, k + k_tau], importance: [k + k_tau].
    """
    k = M.shape[1]
    energy = float(np.linalg.norm(R) ** 2)

    R_hat, R_M = equation_4(R, M)
    U_hat, Sigma_hat, _ = np.linalg.svd(R_hat, full_matrices=False)
    k_tau = equation_5(float(np.linalg.norm(R_M) ** 2), Sigma_hat, energy, threshold)

    U_M, Sigma_M, _ = np.linalg.svd(R_M, full_matrices=False)
    C = equation_6(M, U_M[:, :k])
    surrogate = equation_7(C, Sigma_M[:k])

    sigma = equation_8(surrogate, Sigma_hat[:k_tau])
    importance_task = equation_2(sigma, alpha)
    old = equation_10(importance, importance_task[:k])
    return np.hstack([M, U_hat[:, :k_tau]]), np.concatenate([old, importance_task[k:]])


def scale_gradient(gradient: Array, M: Array, importance: Array) -> Array:
    """Compute the gradient that task tau > 1 is trained with (Eq. 3). gradient: [d, out]."""
    return equation_3(gradient, M, importance)


def run_sgp(
    weight: Array,
    tasks: Sequence[tuple[Sequence[Callable[[Array], Array]], Callable[[Array], Array]]],
    *,
    lr: float,
    threshold: float,
    alpha: float,
) -> tuple[Array, Array, Array]:
    """Run Algorithm 1 for one layer; return weight [d, out], bases [d, k] and importances [k] after all tasks.

    A task consists of the gradients of its mini-batches and of its representation matrix, all functions of the
    weight.
    """
    M, importance = np.zeros((weight.shape[0], 0)), np.zeros(0)
    for gradients, representation in tasks:
        for gradient in gradients:
            weight = weight - lr * scale_gradient(gradient(weight), M, importance)
        M, importance = learn_next_task(M, importance, representation(weight), threshold, alpha)
    return weight, M, importance


def run_adam_gp(
    weight: Array,
    gradients: Sequence[Array],
    M: Array,
    importance: Array,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> list[Array]:
    """Run Algorithm 2, Adam-GP; return the weights after each step. weight and each gradient: [d, out]."""
    beta_1, beta_2 = betas
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    weights = []
    for t, g in enumerate(gradients, start=1):
        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        m_hat = m / (1 - beta_1**t)
        v_hat = v / (1 - beta_2**t)
        g_adam = m_hat / (np.sqrt(v_hat) + eps)
        g_projected = scale_gradient(g_adam, M, importance)
        weight = weight - lr * g_projected
        weights.append(weight)
    return weights
