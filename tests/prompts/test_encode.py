"""From prompts of every form to token ids."""

from typing import Any

import pytest

from hybrid.errors import PromptError
from hybrid.prompts.encode import encode


def test_prompts_become_token_ids(tokenizer: Any) -> None:
    assert encode(tokenizer, "Größe") == tokenizer("Größe").input_ids
    assert encode(tokenizer, [5, 6]) == [5, 6]
    assert encode(None, [5, 6]) == [5, 6]
    chat = encode(tokenizer, [{"role": "user", "content": "日本"}])
    assert tokenizer.decode(chat) == "<|im_start|>user\n日本<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "prompt", [None, 5, 5.0, b"text", {"role": "user"}, [1, "a"], [1.0], [True], [[1], [2]], ["a"]]
)
def test_another_form_of_prompt_is_refused(prompt: Any, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="a prompt is a text, a list of token ids, or a list of chat messages"):
        encode(tokenizer, prompt)
