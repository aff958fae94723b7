"""The model types that the installed transformers has, and the versions that have others."""

from importlib.metadata import version

from packaging.version import Version

NEEDED = {
    "bailing_hybrid": "5.20",
    "inkling2_loop_text": "5.24",
    "inkling2_text": "5.23",
    "kimi_linear": "5.17",
    "lara_mini": "5.24",
    "lfm3": "5.23",
    "qwen4_exp_text": "5.21",
}
"""Model types that older allowed versions of transformers lack, and the first version that has each."""

STATES_ARE_READ = "5.21"
"""The first version of transformers whose cache is asked for states, in place of its layers."""


def is_new_enough(model_type: str) -> bool:
    """Tell whether the installed transformers is of a version that has a type."""
    return Version(version("transformers")) >= Version(NEEDED.get(model_type, "0"))


def is_in_transformers(model_type: str) -> bool:
    """Tell whether transformers has a causal language model of a type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
