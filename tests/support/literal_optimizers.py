"""The row optimizers in numpy, in the order of operations of ``cpp_ext/optim``, and FTRL as its paper has it.

With float32 they are transcriptions of the kernels. With float64 they are references where torch has no such optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparserow.proto.native import optimizer_parameters
from sparserow.proto.optim import RowOptimizer

Array = np.ndarray[Any, Any]
LANES = 16  # partial sums of a kernel's sum over columns


class LiteralRow:
    """One row with its state.

    Args:
        optimizer: the optimizer.
        weights: the first weights, (dim).
        real: the dtype of all arithmetic but that of corrections, which is float64.
    """

    def __init__(self, optimizer: RowOptimizer, weights: Array, real: type) -> None:
        self.kind, options = optimizer_parameters(optimizer)
        if real is np.float32:  # options cross to the servers as float32
            options = {name: np.float32(each).item() if type(each) is float else each for name, each in options.items()}
        self.options: dict[str, Any] = options
        self.real, self.weights, self.count = real, weights.astype(real), 0
        zeros = np.zeros(len(weights), real)
        self.state = [zeros.copy() for _ in range(-(-optimizer.state_floats(len(weights)) // len(weights)))]
        if self.kind == "adagrad":
            self.state[0] += real(options["initial_accumulator"])
        self.sum = real(options.get("initial_accumulator", 0.0))  # of row-wise Adagrad
        self.step: Callable[[Array, Array, float], Array] = getattr(self, f"_{self.kind}")

    def update(self, grad: Array, lr: float) -> None:
        """Moves the row by a gradient, (dim) float32."""
        self.count += 1
        decay = self.options["weight_decay"]
        is_decoupled = self.options["decoupled"]
        lr = np.float32(lr).item() if self.real is np.float32 else lr
        grad = grad.astype(self.real)
        if not is_decoupled:
            grad = grad + self.real(decay) * self.weights
        elif self.kind != "lamb":
            self.weights = self.real(1.0 - lr * decay) * self.weights
        self.weights = self.step(grad, self.weights, lr)

    def _number(self, name: str) -> Any:
        return self.real(self.options[name])

    def _sum(self, terms: Array) -> Any:
        if self.real is np.float64:
            return terms.sum()
        padded = np.zeros(-(-len(terms) // LANES) * LANES, self.real)
        padded[: len(terms)] = terms
        partial = np.zeros(LANES, self.real)
        for chunk in padded.reshape(-1, LANES):
            partial = partial + chunk
        half = LANES // 2
        while half:
            partial = partial[:half] + partial[half : 2 * half]
            half //= 2
        return partial[0]

    def _sgd(self, grad: Array, weights: Array, lr: float) -> Array:
        momentum = self._number("momentum")
        if momentum == 0:
            return weights - self.real(lr) * grad
        is_first = self.count == 1
        taken = grad if is_first else (self.real(1) - self._number("dampening")) * grad
        self.state[0] = taken if is_first else momentum * self.state[0] + taken
        ahead = grad + momentum * self.state[0] if self.options["nesterov"] else self.state[0]
        return weights - self.real(lr) * ahead

    def _adagrad(self, grad: Array, weights: Array, lr: float) -> Array:
        self.state[0] = self._number("accumulator_decay") * self.state[0] + grad * grad
        return weights - self.real(lr) * (grad / (np.sqrt(self.state[0]) + self._number("eps")))

    def _rowwise_adagrad(self, grad: Array, weights: Array, lr: float) -> Array:
        mean = self._sum(grad * grad) / self.real(len(grad))
        self.sum = self._number("accumulator_decay") * self.sum + mean
        return weights - self.real(lr) * (grad / (np.sqrt(self.sum) + self._number("eps")))

    def _moments(self, grad: Array) -> tuple[Array, Array]:
        beta1, beta2 = self.options["beta1"], self.options["beta2"]
        self.state[0] = self.state[0] + (grad - self.state[0]) * self.real(1.0 - beta1)
        self.state[1] = self.real(beta2) * self.state[1] + self.real(1.0 - beta2) * (grad * grad)
        return self.state[0], self.state[1]

    def _corrections(self) -> tuple[float, float]:
        return 1.0 - self.options["beta1"] ** self.count, 1.0 - self.options["beta2"] ** self.count

    def _adam(self, grad: Array, weights: Array, lr: float) -> Array:
        first, second = self._moments(grad)
        correction1, correction2 = self._corrections()
        if self.options["amsgrad"]:
            second = self.state[2] = np.maximum(self.state[2], second)
        root = np.sqrt(second) / self.real(np.sqrt(correction2)) + self._number("eps")
        return weights - self.real(lr / correction1) * (first / root)

    def _rmsprop(self, grad: Array, weights: Array, lr: float) -> Array:
        alpha, arrays = self.options["alpha"], iter(range(1, len(self.state)))
        square = self.state[0] = self.real(alpha) * self.state[0] + self.real(1.0 - alpha) * (grad * grad)
        if self.options["centered"]:
            at = next(arrays)
            self.state[at] = self.state[at] + (grad - self.state[at]) * self.real(1.0 - alpha)
            square = np.maximum(square - self.state[at] * self.state[at], self.real(0))
        moved = grad / (np.sqrt(square) + self._number("eps"))
        if self.options["momentum"] > 0:
            at = next(arrays)
            moved = self.state[at] = self._number("momentum") * self.state[at] + moved
        return weights - self.real(lr) * moved

    def _adadelta(self, grad: Array, weights: Array, lr: float) -> Array:
        keep, take, eps = self._number("rho"), self.real(1.0 - self.options["rho"]), self._number("eps")
        self.state[0] = keep * self.state[0] + take * (grad * grad)
        step = np.sqrt(self.state[1] + eps) / np.sqrt(self.state[0] + eps) * grad
        self.state[1] = keep * self.state[1] + take * (step * step)
        return weights - self.real(lr) * step

    def _lion(self, grad: Array, weights: Array, lr: float) -> Array:
        moved = self.state[0] + (grad - self.state[0]) * self.real(1.0 - self.options["beta1"])
        self.state[0] = self.state[0] + (grad - self.state[0]) * self.real(1.0 - self.options["beta2"])
        return weights - self.real(lr) * np.sign(moved)

    def _lamb(self, grad: Array, weights: Array, lr: float) -> Array:
        first, second = self._moments(grad)
        correction1, correction2 = self._corrections()
        root = np.sqrt(second) / self.real(np.sqrt(correction2)) + self._number("eps")
        step = first / self.real(correction1) / root
        if self.options["decoupled"]:
            step = step + self._number("weight_decay") * weights
        size, moved = np.sqrt(self._sum(weights * weights)), np.sqrt(self._sum(step * step))
        ratio = size / moved if size > 0 and moved > 0 else self.real(1)
        return weights - (self.real(lr) * ratio) * step

    def _ftrl(self, grad: Array, weights: Array, lr: float) -> Array:
        real, l1, l2 = self.real, self._number("l1"), self._number("l2")
        assert self.options["group_lasso"] == 0, "McMahanRow is the reference of group lasso"
        self.state[0] = self.state[0] + grad * grad
        proximity = self._number("beta") + np.sqrt(self.state[0])
        step = real(lr) / (proximity + real(lr) * l2)
        is_zero, sign = weights == 0, np.where(weights < 0, real(-1), real(1))
        slope = np.where(is_zero, grad + self.state[1], grad)
        own = weights - step * np.where(is_zero, slope + l1, slope)
        other = weights - step * (slope - np.where(is_zero, l1, sign * real(2) * l1))
        moved = np.where(sign * own > 0, own, np.where(sign * other < 0, other, real(0)))
        pull = weights * (proximity * (real(1) / real(lr)) + l2) + sign * l1
        rest = np.clip(np.where(is_zero, grad + self.state[1], grad - pull), -l1, l1)
        self.state[1] = np.where(moved == 0, rest, -np.sign(moved) * l1)
        return moved


class McMahanRow:
    """One row of FTRL-proximal in float64, as algorithm 1 of McMahan et al. 2013 has it, with z and n.

    Where the learning rate changes, sigma is the change of ``(beta + sqrt(n)) / lr``, the inverse of the rate of each
    coordinate, as the paper derives it. With group lasso the weights are the exact minimum, found by bisection.
    """

    def __init__(self, optimizer: RowOptimizer, weights: Array, lr: float) -> None:
        _, self.options = optimizer_parameters(optimizer)
        self.weights = weights.astype(np.float64)
        self.n = np.zeros(len(weights))
        self.inverse_rate = (self.options["beta"] + np.sqrt(self.n)) / lr
        self.limit = self.options["group_lasso"] * np.sqrt(len(weights))
        self.z = self._dual(self.weights)

    def update(self, grad: Array, lr: float) -> None:
        """Moves the row by a gradient, (dim)."""
        decay = self.options["weight_decay"]
        grad = grad.astype(np.float64)
        if self.options["decoupled"]:
            is_in_band = self.weights == 0
            self.weights = (1.0 - lr * decay) * self.weights
            self.z = np.where(is_in_band, self.z, self._dual(self.weights))
        else:
            grad = grad + decay * self.weights
        self.n = self.n + grad * grad
        inverse_rate = (self.options["beta"] + np.sqrt(self.n)) / lr
        self.z = self.z + grad - (inverse_rate - self.inverse_rate) * self.weights
        self.inverse_rate = inverse_rate
        self.weights = self._minimum()

    def _dual(self, weights: Array) -> Array:
        """Returns the z whose minimum the weights are; 0 where a weight is 0."""
        norm = np.linalg.norm(weights)
        group = self.limit / norm if norm > 0 else 0.0
        return -weights * (self.inverse_rate + self.options["l2"] + group) - np.sign(weights) * self.options["l1"]

    def _minimum(self) -> Array:
        soft = np.sign(self.z) * np.maximum(np.abs(self.z) - self.options["l1"], 0.0)
        curvature = self.inverse_rate + self.options["l2"]
        if self.limit == 0:
            return -soft / curvature
        if np.linalg.norm(soft) <= self.limit:
            return np.zeros_like(soft)
        low, high = 0.0, float(np.linalg.norm(soft / curvature))
        for _ in range(60):
            norm = (low + high) / 2
            is_short = np.linalg.norm(soft / (curvature * norm + self.limit)) > 1
            low, high = (norm, high) if is_short else (low, norm)
        return -soft / (curvature + self.limit / high)
