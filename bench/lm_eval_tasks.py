"""The engine as a model of lm-evaluation-harness, beside the harness's own model of transformers: the same tasks, of
documentation that comes with Python, in the harness's own format. Needs the extra `lm-eval`.

    python bench/lm_eval_tasks.py --documents 100
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hybrid import CacheConfig, Engine
from hybrid.lm_eval.model import HybridLM

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{train: {data}, test: {data}}}}}
training_split: train
test_split: test
metadata: {{version: 1.0}}
"""

TASKS = {
    "next_sentence": """
task: next_sentence
output_type: multiple_choice
doc_to_text: "Continue the text.\\n\\n{{{{passage}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: target
num_fewshot: 6
fewshot_config: {{sampler: first_n}}
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "perplexity_of_documents": """
task: perplexity_of_documents
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
""",
    "end_of_sentence": """
task: end_of_sentence
output_type: generate_until
doc_to_text: "{{{{passage}}}}"
doc_to_target: "{{{{choices[target]}}}}"
num_fewshot: 2
fewshot_config: {{sampler: first_n}}
generation_kwargs: {{until: ["."], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""",
}


def documents(count: int) -> list[dict[str, Any]]:
    """Passages of documentation, each with the sentence that follows it and three that do not."""
    rng, found = random.Random(0), []
    texts = sorted(re.sub(r"\s+", " ", text) for text in topics.values())
    pieces = [sentences for text in texts if len(sentences := re.split(r"(?<=\.) ", text)) > 8]
    for at in range(count):
        own = pieces[at % len(pieces)]
        start = rng.randrange(len(own) - 4)
        choices = [" " + rng.choice(rng.choice(pieces))[:60] for _ in range(3)]
        target = rng.randrange(4)
        choices.insert(target, " " + own[start + 3][:60])
        passage = " ".join(own[start : start + 3])[:200]
        text = " ".join(own[start:])[:3000]
        found.append({"passage": passage, "choices": choices, "target": target, "text": text})
    return found


def write_tasks(folder: Path, count: int) -> TaskManager:
    """Write the tasks and their data."""
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, documents(count))), encoding="utf-8")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text((text + COMMON).format(data=data), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def run(model: Any, tasks: TaskManager, name: str) -> dict[str, Any]:
    """One task: its metrics, the answer to each request, and the seconds that it took."""
    began = time.perf_counter()
    result = lm_eval.simple_evaluate(model=model, tasks=[name], task_manager=tasks, bootstrap_iters=0)
    seconds = time.perf_counter() - began
    metrics = {key.split(",")[0]: value for key, value in result["results"][name].items() if isinstance(value, float)}
    samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
    return {"metrics": metrics, "answers": [sample["resps"] for sample in samples], "seconds": seconds}


def values(answer: Any) -> list[float]:
    """All log-probabilities in what the harness keeps of an answer."""
    if isinstance(answer, list | tuple):
        return [value for part in answer for value in values(part)]
    return [float(answer)] if isinstance(answer, float) else []


def main(arguments: list[str] | None = None) -> int:
    """Run the tasks on both, and print how they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent.parent / "models" / "tiny"), help="a folder")
    parser.add_argument("--documents", type=int, default=100, help="of each task (default: 100)")
    parser.add_argument("--memory", default="512MiB", help="of the engine's cache (default: 512MiB)")
    parser.add_argument("--max-length", type=int, default=2047)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args(arguments)
    sys.modules["fla"] = None  # type: ignore[assignment]  # where it is installed transformers needs a GPU for it
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tasks = write_tasks(Path(folder), args.documents)
        engine = Engine.from_pretrained(args.model, dtype="float32", cache=CacheConfig(memory=args.memory))
        ours = HybridLM(engine, max_length=args.max_length)
        theirs = HFLM(args.model, dtype="float32", device="cpu", batch_size=8, max_length=args.max_length)
        for name in TASKS:
            before = engine.cache.stats()
            own, other = run(ours, tasks, name), run(theirs, tasks, name)
            after = engine.cache.stats()
            cached, asked = after.usable_tokens - before.usable_tokens, after.prompt_tokens - before.prompt_tokens
            pairs = list(zip(values(own["answers"]), values(other["answers"]), strict=True))
            same = sum(a == b for a, b in zip(own["answers"], other["answers"], strict=True))
            found[name] = {
                "metrics": own["metrics"],
                "metrics_of_transformers": other["metrics"],
                "largest_difference": max((abs(a - b) for a, b in pairs), default=0.0),
                "largest_value": max((abs(b) for _, b in pairs), default=0.0),
                "equal_answers": f"{same} of {len(own['answers'])}",
                "hit_rate": cached / asked,
                "seconds": own["seconds"],
                "seconds_of_transformers": other["seconds"],
            }
            if not args.json:
                print(name, json.dumps(found[name], indent=2), flush=True)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
