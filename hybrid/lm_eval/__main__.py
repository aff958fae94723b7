"""The harness's own command, which knows the model `hybrid` besides its own.

python -m hybrid.lm_eval run --model hybrid --model_args pretrained=tiny --tasks ...
"""

from lm_eval.__main__ import cli_evaluate

from hybrid.lm_eval import model  # noqa: F401 - it registers itself

if __name__ == "__main__":
    cli_evaluate()
