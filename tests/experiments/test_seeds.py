"""Each use of random numbers has a seed of its own."""

import torch

from sgp.experiments.seeds import derive_seed, make_generator


def test_the_same_use_has_the_same_seed_here_and_everywhere() -> None:
    assert derive_seed(3, "order", 1, 2) == derive_seed(3, "order", 1, 2)
    # Written down, since old runs must be repeatable with later versions.
    assert derive_seed(0, "weights") == 133441691874178746
    assert derive_seed(3, "order", 1, 2) == 8855319966576009426


def test_every_use_and_position_has_another_seed() -> None:
    uses = ("weights", "order", "dropout", "consolidate", "test", "validation")
    seeds = [
        derive_seed(seed, use, *position)
        for seed in range(12)
        for use in uses
        for position in [
            (),
            *((task,) for task in range(12)),
            *((task, epoch) for task in range(12) for epoch in range(12)),
        ]
    ]
    assert len(set(seeds)) == len(seeds)


def test_torch_takes_every_seed() -> None:
    for seed in range(100):
        assert 0 <= derive_seed(seed, "order") < 2**63
        torch.Generator().manual_seed(derive_seed(seed, "order"))


def test_a_generator_does_not_touch_the_global_state() -> None:
    state = torch.get_rng_state()
    drawn = torch.randn(3, generator=make_generator(0, "order"))
    assert torch.equal(drawn, torch.randn(3, generator=make_generator(0, "order")))
    assert not torch.equal(drawn, torch.randn(3, generator=make_generator(0, "dropout")))
    assert torch.equal(torch.get_rng_state(), state)
