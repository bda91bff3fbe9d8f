"""Models of `transformers` from configurations: the same weights each time, and inputs that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxopt.deploy.configurations import inputs_for, is_configuration, model_of_configuration
from fxopt.errors import InputError

transformers = pytest.importorskip("transformers")

TEXT: dict[str, Any] = {"vocab_size": 60, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL: dict[str, dict[str, Any]] = {
    "BertConfig": TEXT | {"intermediate_size": 8},
    "GPT2Config": {"vocab_size": 60, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "T5Config": {"vocab_size": 60, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
    "BartConfig": {
        "vocab_size": 60, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
    },
    "ViTConfig": {
        "image_size": [8, 16], "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "num_channels": 2,
    },
    "ResNetConfig": {"embedding_size": 4, "hidden_sizes": [4, 4], "depths": [1, 1], "layer_type": "basic"},
    "CLIPConfig": {
        "text_config": TEXT | {"intermediate_size": 8, "eos_token_id": 59},
        "vision_config": {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "intermediate_size": 8},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_a_model_runs_on_the_inputs_drawn_for_it(name: str):
    model = model_of_configuration(getattr(transformers, name)(**SMALL[name]))
    inputs = inputs_for(model)
    assert inputs and not model.training
    with torch.no_grad():
        model(**inputs)


def test_inputs_have_the_form_that_the_configuration_gives():
    text = inputs_for(model_of_configuration(transformers.T5Config(**SMALL["T5Config"])))
    assert text is not None
    assert {name: tuple(each.shape) for name, each in text.items()} == {
        "input_ids": (2, 16),
        "decoder_input_ids": (2, 16),
    }
    images = inputs_for(model_of_configuration(transformers.ViTConfig(**SMALL["ViTConfig"])))
    assert images is not None
    assert {name: tuple(each.shape) for name, each in images.items()} == {"pixel_values": (2, 2, 8, 16)}


def test_weights_are_the_same_each_time_and_random_numbers_go_on_as_before():
    configuration = transformers.BertConfig(**SMALL["BertConfig"])
    state = torch.get_rng_state()
    first = model_of_configuration(configuration).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(1)
    second = model_of_configuration(configuration).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_what_is_no_configuration_or_has_no_model():
    assert is_configuration(transformers.BertConfig()) and not is_configuration(transformers.BertConfig)
    assert inputs_for(nn.Linear(1, 1)) is None
    with pytest.raises(InputError, match="builds no model of a plain PreTrainedConfig"):
        model_of_configuration(transformers.PreTrainedConfig())
