"""The layers of a config.json are those of the model that transformers builds from it, and what has none says so.

One tiny model of every supported type, saved as transformers saves it, with the architecture named as released
configurations do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers", minversion="5.17", reason="needs transformers")

from replayssm.integrations.transformers import layer_specs
from tests.integrations.tiny_models import MODELS, model_of
from tuning.__main__ import main
from tuning.model_config import shape_of_config
from tuning.shapes import lookup


def saved(kind: str, folder: Path) -> Path:
    model = model_of(kind)
    model.config.save_pretrained(folder / kind)
    path = folder / kind / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [type(model).__name__]}))
    return path


@pytest.mark.parametrize("kind", MODELS)
def test_the_layers_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    shape = shape_of_config(str(saved(kind, tmp_path)))
    layers = layer_specs(model_of(kind))
    assert (shape.name, shape.layer, shape.num_layers) == (kind, layers[0], len(layers))
    assert (shape.lower_bound == -5.0) == (kind == "glm5_next")


def test_a_configuration_without_an_architecture_is_a_causal_model(tmp_path: Path) -> None:
    model_of("mamba2").config.save_pretrained(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "My-Model.json")
    shape = lookup(str(tmp_path / "My-Model.json"), tp=2)
    assert (shape.name, shape.layer.num_v_heads, shape.layer.num_k_heads) == ("my-model@tp2", 2, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 8,
          "num_hidden_layers": 1}, "expected state-space layers, got .*, a llama without any of Mamba-2"),
        ({"model_type": "no-such-model"}, "expected the config.json of a causal language model, got .*no-such-model"),
        ({"hidden_size": 16}, "expected the config.json of a causal language model, got .*model_type"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_serve(content: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        shape_of_config(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a known name or a config\.json, got .*which is no file"):
        lookup(str(tmp_path / "config.json"))


def test_the_commands_take_a_path(tmp_path: Path) -> None:
    path = saved("kimi_linear", tmp_path)
    words = ["show", "--arch", "sm_90a", "--model", str(path), "--batch", "1"]
    result = CliRunner().invoke(main, words)
    assert "kimi_linear" in result.output, result.output
