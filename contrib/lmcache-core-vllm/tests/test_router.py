"""The example of a router, as it is, between engines that note what they are sent."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lmcache_testing.waiting import WAIT_S, until

ROUTER = Path(__file__).parents[3] / "examples/prefill_decode_router.py"
ASKED = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}


class Engine(ThreadingHTTPServer):
    """Answers what the test says, and keeps what it was sent."""

    daemon_threads = True

    def __init__(self, *answers: tuple[int, dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = list(answers)
        self.answered = 0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.came = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.may_end = threading.Event()
        self.may_end.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A router that hangs up is no error here."""


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.reply(200, {"path": self.path})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        self.server.came.set()
        if "kv_transfer_params" in body:
            assert self.server.may_answer.wait(WAIT_S)
        status, answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.reply(status, answer)

    def reply(self, status: int, answer: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        content = json.dumps(answer).encode()
        self.wfile.write(content[:1])
        self.wfile.flush()
        assert self.server.may_end.wait(WAIT_S)
        self.wfile.write(content[1:])
        self.server.answered += 1


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def start(*answers: tuple[int, dict[str, Any]]) -> Engine:
            made = Engine(*(answers or [(200, {"choices": "decoded"})]))
            stack.callback(made.server_close)
            stack.callback(made.shutdown)
            return made

        yield start


@pytest.fixture
def router() -> Iterator[Callable[..., str]]:
    """Start it; its address."""
    with ExitStack() as stack:

        def start(prefill: str, decode: str, mode: str = "together") -> str:
            command = [
                sys.executable,
                str(ROUTER),
                "--prefill",
                prefill,
                "--decode",
                decode,
                "--mode",
                mode,
                "--port",
                "0",
            ]
            popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            stack.callback(popen.wait)
            stack.callback(popen.kill)
            assert popen.stdout is not None
            stack.callback(popen.stdout.close)
            return f"http://{popen.stdout.readline().split()[-1]}"

        yield start


def post(url: str, body: Any = ASKED, path: str = "/v1/completions") -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.load(answer)


def test_both_engines_get_a_request_at_once_with_the_same_transfer(
    engine: Callable[..., Engine], router: Callable[..., str]
) -> None:
    prefill, decode = engine(), engine()
    prefill.may_answer.clear()  # it computes until the other one has answered
    assert post(router(prefill.url, decode.url)) == {"choices": "decoded"}
    assert prefill.came.wait(WAIT_S)
    ((path, computed),), ((_, decoded),) = prefill.requests, decode.requests
    transfer_id = decoded["kv_transfer_params"].pop("transfer_id")
    assert path == "/v1/completions"
    assert decoded == {**ASKED, "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True}}
    assert computed == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id},
    }
    prefill.may_answer.set()


def test_a_chat_is_cut_to_one_token_under_the_name_that_it_uses(
    engine: Callable[..., Engine], router: Callable[..., str]
) -> None:
    prefill, decode = engine(), engine()
    post(router(prefill.url, decode.url), {"max_completion_tokens": 9}, "/v1/chat/completions")
    assert prefill.came.wait(WAIT_S)
    assert prefill.requests[0][1]["max_completion_tokens"] == 1
    assert decode.requests[0][1]["max_completion_tokens"] == 9


@pytest.mark.parametrize("status", [500, None], ids=["an error", "nobody there"])
def test_if_the_first_engine_fails_the_second_computes_the_prompt_at_once(
    engine: Callable[..., Engine], router: Callable[..., str], status: int | None
) -> None:
    decode = engine()
    decode.may_answer.clear()  # it would wait for the other engine
    prefill = engine((status, {})).url if status else "http://127.0.0.1:9"
    assert post(router(prefill, decode.url)) == {"choices": "decoded"}
    # the one that was dropped may be read after the other one
    assert [body for _, body in decode.requests if "kv_transfer_params" not in body] == [ASKED]
    decode.may_answer.set()


def test_an_answer_that_has_begun_is_not_begun_again(engine: Callable[..., Engine], router: Callable[..., str]) -> None:
    prefill, decode = engine((500, {})), engine()
    prefill.may_answer.clear()
    decode.may_end.clear()
    request = urllib.request.Request(router(prefill.url, decode.url) + "/v1/completions", json.dumps(ASKED).encode())
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        first = answer.read(1)
        prefill.may_answer.set()
        until(lambda: prefill.answered, "the failure")
        decode.may_end.set()
        assert json.loads(first + answer.read()) == {"choices": "decoded"}
    assert len(decode.requests) == 1


def test_after_the_first_engine_has_answered_the_second_gets_what_it_said(
    engine: Callable[..., Engine], router: Callable[..., str]
) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "t", "remote_prefill_ended": True}
    prefill, decode = engine((200, {"kv_transfer_params": params})), engine()
    post(router(prefill.url, decode.url, "after"))
    assert decode.requests[0][1] == {**ASKED, "kv_transfer_params": params}


def test_on_another_node_the_second_engine_gets_the_request_as_it_is(
    engine: Callable[..., Engine], router: Callable[..., str]
) -> None:
    prefill, decode = engine((200, {"kv_transfer_params": {"do_remote_prefill": True}})), engine()
    post(router(prefill.url, decode.url, "across"))
    assert prefill.requests[0][1]["max_tokens"] == 1
    assert decode.requests[0][1] == ASKED


def test_everything_else_goes_to_the_engine_that_decodes(
    engine: Callable[..., Engine], router: Callable[..., str]
) -> None:
    prefill, decode = engine(), engine()
    url = router(prefill.url, decode.url)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=WAIT_S) as answer:
        assert json.load(answer) == {"path": "/v1/models"}
    post(url, {"input": "x"}, "/v1/embeddings")
    assert (prefill.requests, decode.requests) == ([], [("/v1/embeddings", {"input": "x"})])


@pytest.mark.parametrize("mode", ["together", "after", "across"])
def test_limits_of_a_client_reach_both_engines(
    engine: Callable[..., Engine], router: Callable[..., str], mode: str
) -> None:
    """What a request keeps out of the cache may be content that others must not find."""
    limits = {"max_load_tokens": 0, "max_offload_tokens": 0}
    prefill, decode = engine((200, {"kv_transfer_params": {"do_remote_prefill": True}})), engine()
    post(router(prefill.url, decode.url, mode), {**ASKED, "kv_transfer_params": limits})
    for (_, body), own in ((prefill.requests[0], "do_remote_decode"), (decode.requests[0], "do_remote_prefill")):
        assert body["kv_transfer_params"].items() >= limits.items()
        assert mode == "across" or body["kv_transfer_params"][own] is True


def test_the_second_engine_waits_for_nothing_that_the_first_may_not_store(
    engine: Callable[..., Engine], router: Callable[..., str]
) -> None:
    ended = {"do_remote_prefill": True, "remote_prefill_ended": True, "remote_num_tokens": 0}
    prefill, decode = engine((200, {"kv_transfer_params": ended})), engine()
    limits = {"max_offload_tokens": 0}
    post(router(prefill.url, decode.url, "together"), {**ASKED, "kv_transfer_params": limits})
    assert decode.requests[0][1]["kv_transfer_params"] == ended | limits


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"no json", 400), (b"[]", 400), (b'{"kv_transfer_params": "text"}', 400), (b"{}", 502)],
)
def test_a_client_hears_what_is_wrong(router: Callable[..., str], body: bytes, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        post(router("http://127.0.0.1:9", "http://127.0.0.1:9"), body)
    assert error.value.code == status
    error.value.close()


def test_the_answers_of_an_engine_keep_their_status(engine: Callable[..., Engine], router: Callable[..., str]) -> None:
    decode = engine((404, {"error": "no such model"}))
    with pytest.raises(urllib.error.HTTPError) as error:
        post(router(engine().url, decode.url, "after"))
    assert error.value.code == 404
    error.value.close()
