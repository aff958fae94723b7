"""Files of other programs are read, wrong ones are refused with a reason, and hashes replay as what they are of."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hybrid.commands.main import main
from hybrid.doctor import Sizes, Traffic, replay
from hybrid.doctor.watch import figures_of
from hybrid.errors import ArgumentError

SIZES = Sizes(32768, 51511296)
CHAT = [{"role": "user", "content": "What is a prefix cache? " * 40}]
CHOICES = {"choices": [{"message": {"role": "assistant", "content": "A cache of prefixes."}}]}

SAMPLES: dict[str, Any] = {
    "request alone": {"model": "m", "messages": CHAT},
    "request and response": {"request": {"messages": CHAT}, "response": CHOICES},
    "batch file": {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT}},
    "litellm": {"id": "1", "startTime": "2026-11-26T10:00:00", "messages": CHAT, "response": CHOICES, "end_user": "u"},
    "completion": {"prompt": CHAT[0]["content"], "max_tokens": 8},
    "sharegpt": {"id": "a", "conversations": [{"from": "human", "value": "Hi " * 90}, {"from": "gpt", "value": "Yes"}]},
    "token ids": {"input_tokens": [*range(100)], "output_tokens": [1, 2]},
    "mooncake": {"timestamp": 27482, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]},
    "vllm log": "INFO 11-26 10:00:00 Received request cmpl-1: prompt: 'a', prompt_token_ids: [1, 2, 3, 4], lora: None.",
    "sglang log": "[2026-11-26 10:00:00] Receive: obj=GenerateReqInput(text=None, input_ids=[1, 2, 3], rid='a')",
}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", list(SAMPLES))
def test_a_format_is_recognised(tmp_path: Path, name: str) -> None:
    lines = ["INFO 11-26 started", SAMPLES[name], SAMPLES[name]] if name == "vllm log" else [SAMPLES[name]] * 2
    traffic = Traffic.read(written(tmp_path / "log.jsonl", *lines))
    (first, fact), (second, again) = traffic
    assert fact.seen == 0 and first.hashes == second.hashes
    assert again.seen == (first.num_prompt - 1) // 64 * 64
    assert first.num_tokens > first.num_prompt or name not in ("request and response", "litellm", "sharegpt")


def test_an_array_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([SAMPLES["sharegpt"]] * 3, indent=1))
    assert Traffic.read(path).num_requests == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"Dear Sir,\nthis is a letter.\n", "line 1: in no format"),
        (b'{"input_tokens": [1, 2]}\n{"colour": "red"}\n', "line 2: in no format"),
        (b'{"input_tokens": [1, "a"]}\n', "line 1: a request that cannot be read"),
        (b"\x89PNG\xff\xfe\n", "line 1: not text"),
        (b'[{"prompt": "a"}, {"pro', "the array ends inside its element 2"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=says):
        Traffic.read(path)


@pytest.mark.parametrize(
    "arguments", [["--memory", "0"], ["--memory", "1MB"], ["--model", "1,2,3"], ["--model", "no/such/folder"]]
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "log.jsonl", SAMPLES["token ids"])
    assert main(["doctor", str(path), *arguments]) == 2
    assert capsys.readouterr().err.startswith("hybrid: ")


def test_hashes_replay_as_the_traffic_that_they_are_of(tmp_path: Path) -> None:
    lines = [{"messages": [*CHAT, {"role": "user", "content": f"secret {n} " * 300}]} for n in (1, 2, 1, 3, 2, 1)]
    path, out = written(tmp_path / "log.jsonl", *lines), tmp_path / "hashes.jsonl"
    assert main(["doctor", "anonymize", str(path), "--out", str(out)]) == 0
    assert "secret" not in out.read_text()
    rows = [replay(each, SIZES, ["vllm", "hybrid"], "2GB", cures=False).rows for each in (path, out)]
    assert [row.hit_tokens for row in rows[0]] == [row.hit_tokens for row in rows[1]]
    assert rows[0][1].hit_tokens > 0


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", *[{"prompt": f"<script>{n}</script>" + "a b " * 3000} for n in range(4)])
    page = tmp_path / "report.html"
    assert main(["doctor", str(path), "--memory", "2GB", "--memory", "4GB", "--out", str(page)]) == 0
    text = page.read_text()
    assert "<script" not in text and "http" not in text and "src=" not in text and "viewport" in text


@pytest.mark.parametrize(("hits", "status"), [(2 * 256, 0), (0, 1)])
def test_a_server_is_compared_with_its_traffic(
    tmp_path: Path, hits: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "log.jsonl", *[{"input_tokens": [*range(600)], "output_tokens": [1]}] * 2)
    page = f"vllm:prefix_cache_queries_total 1200\nvllm:prefix_cache_hits_total {hits}\n"
    page += 'vllm:cache_config_info{block_size="256",num_gpu_blocks="40"} 1\n'

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *given: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["doctor", "watch", url, str(path), "--model", "tiny"]) == status
        thread.join()
    assert "42.7 %" in capsys.readouterr().out  # of the replay: no memory and no block size were given


def test_figures_of_a_server() -> None:
    text = (
        "# HELP vllm:prefix_cache_queries_total Queries\n"
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0\n'
        'vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1000.0\n'
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 500.0\n'
    )
    text += 'vllm:cache_config_info{_block_size_resolved="True",block_size="256",num_gpu_blocks="40"} 1.0\n'
    figures = figures_of(text, "page")
    assert (figures.engine, figures.hit_rate) == ("vllm", 25.0)
    assert (figures.block_size, figures.num_blocks) == (256, 40)
    text += 'hybrid:cache_bytes{kind="pages"} 1e6\nhybrid:cache_bytes{kind="free"} 500.0\n'
    text += "hybrid:token_bytes 1024.0\nhybrid:checkpoint_bytes 229376.0\n"
    figures = figures_of(text, "page")  # hybrid serve has vLLM's names
    assert (figures.engine, figures.hit_rate, figures.memory) == ("hybrid", 25.0, 1000500)
    assert figures.sizes == Sizes(1024, 229376)
    with pytest.raises(ArgumentError, match="none of the counters"):
        figures_of("process_cpu_seconds_total 3\n", "page")
