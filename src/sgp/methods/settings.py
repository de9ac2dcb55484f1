"""Settings and facts of all methods. Nothing here imports torch, so the command line starts quickly.

The class of a method NAME is in the module `sgp.methods.NAME`, with `_` in place of `-`; its name is that of its facts
without `Facts`. `sgp list methods` lists the methods in the order of their facts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sgp.settings import Settings, setting


@dataclass(frozen=True)
class NoSettings:
    """Settings of a method without settings."""


class MethodFacts:
    """Facts of a method: its name, its settings, and what it can do.

    Attributes:
        name: Name in the registry and on the command line.
        description: One line for `sgp list methods`.
        Settings: Frozen dataclass of the method's settings; their values on each benchmark are in sgp.paper.
        keeps_data: Whether the method stores examples of old tasks.
        supervised_only: Whether the method changes the loss, the batch or the forward pass.
        projects_steps: Whether a gradient memory projects the optimizer's steps.
        trains_jointly: Whether all tasks are learned at once. An epoch then goes through all of them, and each batch
            comes from one task.
        rounds_weights: Whether `consolidate` changes the weights, so that nothing can be fitted to them before it.
        packages: Packages beside torch that the method's numbers depend on; a run records their versions.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    Settings: ClassVar[type[Any]] = NoSettings
    keeps_data: ClassVar[bool] = False
    supervised_only: ClassVar[bool] = False
    projects_steps: ClassVar[bool] = False
    trains_jointly: ClassVar[bool] = False
    rounds_weights: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()


class FinetuneFacts(MethodFacts):
    """Facts of :class:`sgp.methods.finetune.Finetune`."""

    name = "finetune"
    description = "plain training on one task after another: the lower bound"


class MultitaskFacts(MethodFacts):
    """Facts of :class:`sgp.methods.multitask.Multitask`."""

    name = "multitask"
    description = "all tasks at once in one network: the upper bound"
    # Data of all tasks are needed to the end.
    keeps_data = True
    supervised_only = True
    trains_jointly = True


class STLFacts(MethodFacts):
    """Facts of :class:`sgp.methods.stl.STL`."""

    name = "stl"
    description = "single-task learning: a network of its own for each task"
    supervised_only = True


@dataclass(frozen=True)
class ReplaySettings(Settings):
    """Settings of methods that replay stored examples."""

    # A single example cannot be normalized by BatchNorm.
    memory_size: int = setting(2000, low=2)
    """Largest number of stored examples of all tasks together."""
    memory_batch: int | None = setting(None, low=2)
    """Number of stored examples that each training step draws; none: as many as the batch has."""
    fill: Literal["first-epoch", "every-epoch"] = "first-epoch"
    """When a task's examples are offered to the memory: in its first epoch, so each once, or in every epoch again."""

    def is_filled(self, epoch: int) -> bool:
        """Return whether the examples of an epoch are offered to the memory."""
        return self.fill == "every-epoch" or epoch == 0

    def count_draws(self, batch_size: int) -> int:
        """Return the number of stored examples to draw beside a batch."""
        return self.memory_batch or batch_size


@dataclass(frozen=True)
class AGEMSettings(ReplaySettings):
    """Settings of A-GEM."""

    per_class: int | None = setting(None, low=1)
    """Largest number of stored examples of one class; none: the classes so far share the memory evenly."""


class AGEMFacts(MethodFacts):
    """Facts of :class:`sgp.methods.a_gem.AGEM`."""

    name = "a-gem"
    description = "averaged gradient episodic memory: no step against the gradient on stored examples of old tasks"
    Settings = AGEMSettings
    keeps_data = True
    supervised_only = True


@dataclass(frozen=True)
class ERSettings(ReplaySettings):
    """Settings of experience replay."""

    reservoir: Literal["uniform", "one-less"] = "uniform"
    """Reservoir sampling of stored examples: with equal probability, or as in the published code with a slightly higher
    one for later examples."""


class ERFacts(MethodFacts):
    """Facts of :class:`sgp.methods.er.ER`."""

    name = "er"
    description = "experience replay: every step trains on some stored examples of old tasks again"
    Settings = ERSettings
    keeps_data = True
    supervised_only = True


@dataclass(frozen=True)
class DERSettings(ReplaySettings):
    """Settings of dark experience replay."""

    fill: Literal["first-epoch", "every-epoch"] = "every-epoch"
    """When examples are offered to the memory. In a task's first epoch their logits come from a network that has hardly
    learned it, so the default is every epoch, as in the published code."""
    alpha: float = setting(0.1, low=0)
    """Weight of the squared distance to the stored logits."""
    beta: float = setting(0.0, low=0)
    """Weight of the cross-entropy of stored examples; above 0 the method is DER++."""


class DERFacts(MethodFacts):
    """Facts of :class:`sgp.methods.der.DER`."""

    name = "der"
    description = "dark experience replay: logits of stored examples should stay as they were"
    Settings = DERSettings
    keeps_data = True
    supervised_only = True


@dataclass(frozen=True)
class PenaltySettings(Settings):
    """Settings of a quadratic penalty."""

    penalty_step: Literal["implicit", "explicit"] = "implicit"
    """implicit: take the penalty's gradient at the end of a step, which is stable at any strength. explicit: take it at
    the start, as usual."""


@dataclass(frozen=True)
class EWCSettings(PenaltySettings):
    """Penalty of EWC, and how its Fisher information is computed."""

    strength: float = setting(5000.0, low=0)
    """lambda of the penalty lambda / 2 sum F (theta - theta*)^2."""
    fisher: Literal["sample", "batch"] = "sample"
    """Square the gradient of each example, or of each batch as in the published code. The batch form is smaller, by up
    to fisher_batch times."""
    fisher_labels: Literal["true", "drawn"] = "true"
    """true: labels of the data. drawn: labels drawn from the network's own output."""
    fisher_batch: int = setting(64, low=1)
    """Number of examples that run through the network at once for the Fisher information."""
    fisher_mode: Literal["eval", "train"] = "eval"
    """Mode of the network for the Fisher information; train has dropout on, as in the published code."""
    merge: Literal["separate", "online", "mean"] = "separate"
    """separate: each task has its own Fisher information and anchor. online: sum the Fisher information of all tasks,
    and use the last task's anchor. mean: like online, with the mean over tasks, as in the published code."""
    decay: float = setting(1.0, low=0, high=1)
    """Factor of the sum of earlier tasks when a new one is added, for merge=online."""
    clip_norm: float = setting(math.inf, above=0, high=math.inf)
    """Largest norm of the gradient of all parameters, penalty included; inf does not clip. The published code uses 100,
    which keeps explicit steps finite."""


class EWCFacts(MethodFacts):
    """Facts of :class:`sgp.methods.ewc.EWC`."""

    name = "ewc"
    description = "elastic weight consolidation: a penalty on change, weighted by Fisher information"
    Settings = EWCSettings


@dataclass(frozen=True)
class SISettings(PenaltySettings):
    """Penalty of synaptic intelligence."""

    strength: float = setting(0.1, low=0)
    """c of the penalty c sum Omega (theta - theta*)^2."""
    damping: float = setting(0.001, above=0)
    """xi, which keeps importances finite where a parameter hardly moved."""


class SIFacts(MethodFacts):
    """Facts of :class:`sgp.methods.si.SI`."""

    name = "si"
    description = "synaptic intelligence: a penalty on change, weighted by each parameter's contribution to the loss"
    Settings = SISettings


@dataclass(frozen=True)
class BLIPSettings(Settings):
    """Settings of BLIP."""

    # A smaller one could be rounded to 0 in float32.
    fisher_prior: float = setting(5e-12, low=1e-30)
    """Fisher information of a parameter before any task, for each of its layer's n. A value four times smaller freezes
    one bit more. The published values are smaller by the square of the batch size that gradients are taken of: 5e-16 at
    100 images and 5e-18 at 62 states of games correspond to 5e-12 and 1.92e-14 here."""
    max_bits: int = setting(20, low=1)
    """Largest number of frozen bits of a parameter."""
    bound: float = setting(6.0, above=0)
    """Weights lie within bound / sqrt(n) of 0. Biases lie within 1."""
    fan: Literal["in", "largest"] = "in"
    """n of a layer: its inputs, for each output; or the larger one of inputs and outputs, as published for games."""
    unfrozen: Literal["keep", "zero"] = "keep"
    """Value of a parameter without a frozen bit after a task: unchanged, or 0 as published, where a unit whose weights
    are all 0 never learns again."""
    fisher_labels: Literal["true", "drawn"] = "drawn"
    """true: labels of the data. drawn: labels drawn from the network's own output, which must be logits."""
    fisher_batch: int = setting(100, low=1)
    """Number of examples that run through the network at once for the Fisher information."""
    fisher_batches: int = setting(80, low=1)
    """Largest number of batches that the Fisher information is computed from."""


class BLIPFacts(MethodFacts):
    """Facts of :class:`sgp.methods.blip.BLIP`."""

    name = "blip"
    description = "bit-level information preserving: each task freezes the first bits of the weights it uses"
    Settings = BLIPSettings
    rounds_weights = True


@dataclass(frozen=True)
class HATSettings(Settings):
    """Settings of HAT."""

    smax: float = setting(400.0, low=1)
    """Slope of the masks at test time and at the end of each epoch; each epoch begins at 1/smax."""
    sparsity: float = setting(0.75, low=0)
    """Weight c of the loss for units that no earlier task uses: larger leaves more for later tasks."""
    test_masks: Literal["soft", "hard"] = "soft"
    """Masks of tests and gates: sigmoid(smax e) as published, or that rounded to 0 and 1, which forgets nothing."""
    embedding_limit: float = setting(6.0, above=0, high=math.inf)
    """Largest absolute value of embeddings."""
    cosh_limit: float = setting(50.0, above=0, high=math.inf)
    """Largest absolute value of s e in the compensation of the embeddings' gradient."""
    clip_norm: float = setting(10000.0, above=0, high=math.inf)
    """Largest norm of the gradient of all parameters."""


class HATFacts(MethodFacts):
    """Facts of :class:`sgp.methods.hat.HAT`."""

    name = "hat"
    description = "hard attention: each task learns which units it uses, and these are closed to later tasks"
    Settings = HATSettings
    supervised_only = True


@dataclass(frozen=True)
class DENSettings(Settings):
    """Settings of DEN: what a task retrains, and when the network grows."""

    l1: float = setting(1e-5, low=0)
    """Amount by which each step shrinks every trained weight. A weight of at most this size does not count as a
    connection. A new head that is trained alone uses `head_l1` instead."""
    l2: float = setting(1e-4, low=0)
    """Weight decay of everything that is trained."""
    head_l1: float = setting(1e-5, low=0)
    """Amount by which each step shrinks the weights of a new head that is trained alone: the larger, the fewer units a
    task retrains."""
    drift: float = setting(0.5, low=0)
    """lambda of the penalty lambda/2 |theta - theta_{t-1}|^2 on what a task retrains, before and after a split."""
    loss_limit: float = setting(0.01, low=0)
    """Mean training loss above which a task adds units."""
    expand_units: int | dict[str, int] = setting(10, low=0)
    """Number of units that a task adds to each layer; or by pattern on layer names."""
    group_lasso: float = setting(0.001, low=0)
    """Amount by which each step shrinks the norm of each new unit's weights. Units whose weights are all 0 are
    removed."""
    split_limit: float = setting(0.05, low=0)
    """Norm of the change of a unit's weights above which the unit is split."""
    split_units: int | dict[str, int] = setting(10, low=0)
    """Largest number of units of each layer that a task splits; or by pattern on layer names."""
    split_choice: Literal["most", "least"] = "most"
    """Units to split if too many moved too far: those that moved most, or as in the published code those that moved
    least."""
    head_epochs: int = setting(5, low=1)
    """Number of epochs that a new head is trained alone."""
    expand_epochs: int = setting(5, low=1)
    """Number of epochs that new units are trained."""
    split_epochs: int = setting(5, low=1)
    """Number of epochs that the network is trained after a split."""


class DENFacts(MethodFacts):
    """Facts of :class:`sgp.methods.den.DEN`."""

    name = "den"
    description = "expandable network: tasks retrain useful units, add units if that fails, split units that moved far"
    Settings = DENSettings
    supervised_only = True


@dataclass(frozen=True)
class RCLSettings(Settings):
    """Settings of RCL: how a task searches for its number of units."""

    trials: int = setting(10, low=1)
    """Number of choices of units that each task tries."""
    trial_epochs: int = setting(2, low=1)
    """Number of epochs that a trial is trained before it is evaluated."""
    most_units: int | dict[str, int] = setting(29, low=0)
    """Largest number of units that a task may add to each layer; or by pattern on layer names."""
    size_penalty: float = setting(1e-4, low=0)
    """xi of the reward, accuracy - xi units added."""
    judged: float = setting(0.1, above=0, below=1)
    """Share of the task's training examples that trials are evaluated on and not trained on."""
    l2: float = setting(1e-4, low=0)
    """Weight decay of everything that is trained."""
    controller_units: int = setting(100, low=1)
    """Number of units of each of the controller's two layers."""
    controller_lr: float = setting(0.001, above=0)
    """Learning rate of Adam for the controller."""
    value_lr: float = setting(0.005, above=0)
    """Learning rate of Adam for the value that rewards are compared with."""
    deep_units: Literal["learned", "as-drawn"] = "learned"
    """Weights into new units of all layers but the first: learned, or left as they were drawn as in the published
    code."""


class RCLFacts(MethodFacts):
    """Facts of :class:`sgp.methods.rcl.RCL`."""

    name = "rcl"
    description = "a controller learns by reinforcement how many units each task adds; old weights never move"
    Settings = RCLSettings
    supervised_only = True


@dataclass(frozen=True)
class OWMSettings(Settings):
    """Settings of OWM."""

    alpha_start: float = setting(1.0, above=0)
    """Regularizer alpha at the start of each task: smaller blocks mean inputs more."""
    alpha_decay: float | dict[str, float] = setting(0.01, above=0, high=1)
    """Factor of alpha over a task; or by pattern on layer names."""
    update: Literal["task", "step"] = "task"
    """When projectors are updated: after each task, as in the authors' text, or at each step, as in the published
    code."""
    clip_norm: float = setting(10.0, above=0, high=math.inf)
    """Largest norm of the gradient of all parameters."""


class OWMFacts(MethodFacts):
    """Facts of :class:`sgp.methods.owm.OWM`."""

    name = "owm"
    description = "orthogonal weights modification: steps are orthogonal to mean inputs of earlier tasks"
    Settings = OWMSettings
    supervised_only = True


@dataclass(frozen=True)
class GPMSettings(Settings):
    """Settings of GPM."""

    threshold: float | dict[str, float] = setting(0.97, above=0, high=1)
    """Share of each layer's input energy that the bases must capture; or by pattern on layer names."""
    threshold_step: float = setting(0.0, low=0, below=1)
    """Increase of the threshold for every later task; it stops at 1."""
    memory_samples: int | dict[str, int] = setting(125, low=1)
    """Number of training inputs that the bases are computed from; or by pattern on layer names."""
    first_rank: Literal["minimal", "one-less"] = "minimal"
    """Rank of the first task's bases: as Eq. 1 requires, or one less as in the published code."""
    truncation: Literal["before", "after"] = "before"
    """When bases beyond a layer's dimension are dropped: before importances are scaled, or after as in the published
    code."""
    orthogonalise: bool = True
    """Make new bases orthogonal to the old ones again; the published code does not."""
    bias: Literal["protect", "freeze"] = "protect"
    """Protect biases like weights, or freeze them after the first task as in the published code."""
    project_every: int = setting(1, low=1)
    """Number of steps whose change is projected at once; 1 is the paper's algorithm, more is cheaper."""


class GPMFacts(MethodFacts):
    """Facts of :class:`sgp.methods.gpm.GPM`."""

    name = "gpm"
    description = "gradient projection memory: no step along directions of earlier tasks"
    Settings = GPMSettings
    projects_steps = True


@dataclass(frozen=True)
class SGPSettings(GPMSettings):
    """Settings of SGP."""

    alpha: float = setting(10.0, low=0, high=math.inf)
    """Scale coefficient of Eq. 2: larger protects more, and inf is GPM."""


class SGPFacts(MethodFacts):
    """Facts of :class:`sgp.methods.sgp.SGP`."""

    name = "sgp"
    description = "scaled gradient projection: steps along old directions shrink by their importance"
    Settings = SGPSettings
    projects_steps = True


@dataclass(frozen=True)
class TRGPSettings(GPMSettings):
    """Settings of TRGP."""

    trust_threshold: float = setting(0.5, low=0, high=1)
    """Share of a layer's gradient norm that must lie in an old task's space for the task to be trusted."""
    trust_tasks: int = setting(2, low=0)
    """Largest number of tasks that a layer trusts; 0 is GPM with another choice of bases."""
    trust_samples: int = setting(125, low=1)
    """Number of training inputs that the gradient for trust is computed from."""
    appended: Literal["all", "all-but-strongest"] = "all"
    """New directions of a task that are protected: all, or all but the strongest as in the published code."""
    scaling: Literal["by-layer", "by-first-layer"] = "by-layer"
    """Scale each layer that trusts a task; or all of them only if the first layer does, as in the published code."""
    representation: Literal["scaled", "plain"] = "scaled"
    """Network whose inputs a task's bases are computed from: the task's own, with scaled weights; or the plain one,
    without scales, as in the published code."""
    unscaled: str = ""
    """Pattern on names of layers that are never scaled; empty: none."""
    norms: Literal["freeze", "free"] = "freeze"
    """Treatment of norm layers after the first task; the published code for Split CIFAR-100 keeps training them."""


class TRGPFacts(MethodFacts):
    """Facts of :class:`sgp.methods.trgp.TRGP`."""

    name = "trgp"
    description = "trust region gradient projection: GPM, with weights scaled in the spaces of trusted old tasks"
    Settings = TRGPSettings
    supervised_only = True
    projects_steps = True


@dataclass(frozen=True)
class FSDGPMSettings(GPMSettings, ReplaySettings):
    """Settings of FS-DGPM."""

    memory_size: int = setting(1000, low=2)
    """Largest number of stored examples of all tasks together."""
    sharpness_lr: float = setting(0.001, low=0)
    """Learning rate eta_1 of the steps uphill that look for sharpness; it falls as the learning rate does."""
    soft_lr: float = setting(0.01, low=0)
    """Learning rate eta_2 of the bases' soft weights; it falls as the learning rate does."""
    inner_steps: int = setting(2, low=1)
    """Number of steps uphill, each on its part of the batch."""
    second_order: bool = False
    """Differentiate through the gradients of the steps uphill too."""
    soft_weights: Literal["repeated", "once", "orphaned"] = "repeated"
    """How soft weights are learned. repeated: lambda := sigmoid(10 (lambda - eta_2 g)) in each step. once: lambda =
    sigmoid(10 u), u := u - eta_2 g, so that steps add up. orphaned: lambda := sigmoid(10 lambda), which no gradient
    reaches, as in the published code."""
    momentum: float = setting(0.0, low=0, below=1)
    """Momentum of weights and soft weights; the published code uses 0.9."""
    clip: float = setting(math.inf, above=0, high=math.inf)
    """Largest entry of a step uphill, and largest norm of the gradient; the published code uses 2."""
    norms: Literal["freeze", "free"] = "freeze"
    """Treatment of norm layers after the first task; the published code for Split CIFAR-100 keeps training them."""


class FSDGPMFacts(MethodFacts):
    """Facts of :class:`sgp.methods.fs_dgpm.FSDGPM`."""

    name = "fs-dgpm"
    description = "flattened sharpness and dynamic gradient projection: replay, and bases with learned weights"
    Settings = FSDGPMSettings
    keeps_data = True
    supervised_only = True
    projects_steps = True


@dataclass(frozen=True)
class PNNSettings(Settings):
    """Settings of PNN."""

    column_width: float = setting(1.0, above=0, high=1)
    """Units of a column's hidden layers as a share of the network's; each layer keeps at least one."""
    scale_deviation: float = setting(0.1, above=0)
    """Standard deviation of the scales a_j of a new column, which are normal around 0."""


class PNNFacts(MethodFacts):
    """Facts of :class:`sgp.methods.pnn.PNN`."""

    name = "pnn"
    description = "progressive networks: a column for each task, frozen afterwards, that feeds later columns"
    Settings = PNNSettings
    supervised_only = True


@dataclass(frozen=True)
class APDSettings(Settings):
    """Settings of APD."""

    l1: float = setting(6e-4, low=0)
    """Weight of |tau|_1; inference treats elements of tau up to this size as 0."""
    weight_decay: float = setting(1e-4, low=0)
    """Weight of the squares of the current task's tau and m, and in the first task of sigma."""
    approx: float = setting(100.0, above=0)
    """Weight of the penalty that keeps the weights of earlier tasks where they were."""
    tau_start: Literal["zero", "shared"] = "zero"
    """tau of a new task: 0, or a copy of sigma as in the published code."""
    mask_start: float = setting(3.0)
    """Mean of m of a new task; 0 in the published code, where tau makes up for the half that the mask takes."""
    penalty: Literal["proximal", "subgradient"] = "proximal"
    """How |tau|_1 is reduced. proximal: tau shrinks towards 0 after each step and stays there. subgradient: by the sign
    of tau in the gradient, which gives small numbers instead of zeros."""
    lr_decay: float = setting(1.0, above=0, high=1)
    """Factor of the learning rate after each epoch, beside the schedule."""
    group_every: int = setting(5, low=0)
    """Interval, in tasks, at which similar tasks get a common part; 0: never."""
    group_centroids: int = setting(2, low=1)
    """Largest number of groups per group_every tasks."""
    group_gap: float = setting(0.01, low=0)
    """Largest difference of an element's values in a group for which it becomes a common element."""


class APDFacts(MethodFacts):
    """Facts of :class:`sgp.methods.apd.APD`."""

    name = "apd"
    description = "additive decomposition: shared weights under a mask of the task, plus a sparse part of the task"
    Settings = APDSettings
    supervised_only = True


@dataclass(frozen=True)
class FrozenSettings(Settings):
    """Settings of linear heads on fixed features."""

    head_decay: float = setting(1e-3, above=0)
    """mu of the penalty mu/2 |W|^2 on a head's weights; without a penalty, classes that can be separated have no best
    head."""


class FrozenFacts(MethodFacts):
    """Facts of :class:`sgp.methods.frozen.Frozen`."""

    name = "frozen"
    description = "heads on an unchanged network: the control for pretrained networks"
    Settings = FrozenSettings
    supervised_only = True


@dataclass(frozen=True)
class LoRASettings(Settings):
    """Settings of LoRA."""

    lora_rank: int = setting(8, low=1)
    """Rank r of the change of each weight."""
    lora_scale: float = setting(16.0, above=0)
    """Scale s; the change is multiplied by s / r."""


class LoRAFacts(MethodFacts):
    """Facts of :class:`sgp.methods.lora.LoRA`."""

    name = "lora"
    description = "low-rank adapters of PEFT, trained on one task after another"
    Settings = LoRASettings
    supervised_only = True
    packages = ("peft",)


@dataclass(frozen=True)
class OSFSettings(Settings):
    """Settings of OSF."""

    preserved: float = setting(0.5, above=0, below=1)
    """Share of each weight's singular directions that is kept as it is."""


class OSFFacts(MethodFacts):
    """Facts of :class:`sgp.methods.osf.OSF`."""

    name = "osf"
    description = "orthogonal subspace fine-tuning of PEFT: the strongest singular directions of weights are kept"
    Settings = OSFSettings
    supervised_only = True
    packages = ("peft",)
