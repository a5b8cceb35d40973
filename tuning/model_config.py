"""The state-space layers of any model that transformers knows, from its config.json."""

from __future__ import annotations

from pathlib import Path

import torch

from tuning.shapes import ModelShape


def shape_of_config(path: str) -> ModelShape:
    """One state-space layer of a model. Its name is that of the folder, or of a file that is not called config.json.

    transformers builds the model on the meta device, without memory for weights, and its layers say what they are.

    Raises:
        ValueError: no such file, a model type that transformers does not know, a model without state-space layers of a
            supported kind, or with several kinds; or transformers is missing.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"model: expected a known name or a config.json, got {path}, which is no file")
    try:
        import transformers

        from replayssm.integrations import transformers as hugging_face
    except ImportError as error:
        raise ValueError("model: a config.json needs transformers; pip install 'replayssm[hf]'") from error
    try:
        config = transformers.AutoConfig.from_pretrained(file)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model = named(config) if named else transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"model: expected the config.json of a causal language model, got {path}: {first}") from error
    try:
        layers = hugging_face.layer_specs(model)
        bounds = {getattr(options, "lower_bound", None) for options in hugging_face.layer_options(model)}
    except NotImplementedError as error:
        raise ValueError(
            f"model: expected state-space layers, got {path}, a {config.model_type} without any of Mamba-2, Gated "
            "DeltaNet or Kimi Delta Attention"
        ) from error
    if len(set(layers)) > 1 or len(bounds) > 1:
        raise ValueError(f"model: expected state-space layers of one shape, got {len(set(layers))} in {path}")
    name = (file.resolve().parent.name if file.name == "config.json" else file.stem).lower()
    return ModelShape(name, layers[0], len(layers), "its config.json", bounds.pop())
