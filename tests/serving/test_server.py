"""`torchbayes serve`: right answers, the same from many threads, and one sentence for every bad request."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

import torchbayes as tb
from tests.campaigns.requests import campaign
from tests.processes import forkserver
from torchbayes.serving.guard import Guard
from torchbayes.serving.service import RequestError, Service

from .conftest import HOSTILE
from .running import running

LIMIT = 0.25  # MB


@pytest.fixture(scope="module")
def pictures(digits: Path) -> Iterator[httpx.Client]:
    application = tb.serving.app(
        tb.load_run(digits), 4, name="digits", max_body=LIMIT, hosts=frozenset({"127.0.0.1"})
    )
    with running(application) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def table(cars: Path) -> Iterator[httpx.Client]:
    application = tb.serving.app(tb.load_run(cars), 4, name=HOSTILE)
    with running(application) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def png(pixels: torch.Tensor, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray((255 * pixels).round().byte().numpy()).save(file, format)
    return file.getvalue()


def test_the_answer_is_that_of_predict(
    run, pictures: httpx.Client, digits: Path, tmp_path: Path
) -> None:
    images = tb.load_data("digits").test.inputs[:2]
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    for file, image in zip(files, images, strict=True):
        file.write_bytes(png(image[0]))
    wanted = json.loads(run("predict", digits, *files, "--samples", "4", "--json")[1])
    sent = [("file", ("x", file.read_bytes(), "image/png")) for file in files]
    told = pictures.post("/predict/image", files=sent).raise_for_status().json()
    assert told["draws"] == 4
    for row, own in zip(wanted, told["predictions"], strict=True):
        assert own["prediction"] == row["class"]
        assert own["confidence"] == pytest.approx(row["confidence"], abs=1e-5)
        assert own["epistemic"] == pytest.approx(row["epistemic"], abs=1e-5)
        assert own["sets"]["90"] == row["set90"]
        assert own["risk"] == row["risk"]
        assert sum(own["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    # The same pixels as numbers: 1/255 steps, which the images have.
    levels = (255 * images).round() / 255
    again = pictures.post("/predict", json={"inputs": levels.tolist()}).json()["predictions"]
    for one, other in zip(told["predictions"], again, strict=True):
        assert one["confidence"] == pytest.approx(other["confidence"], abs=1e-5)


def test_rows_of_a_table_by_column_in_any_order(
    run, table: httpx.Client, cars: Path, tmp_path: Path
) -> None:
    rows = [
        {"weight": 1500, "power": 90.5, "origin": "US", "doors": None},
        {"power": "120", "doors": 3, "origin": HOSTILE, "weight": 900},
    ]
    text = f"weight,power,origin,doors\n1500,90.5,US,\n900,120,{HOSTILE},3\n"
    (tmp_path / "new.csv").write_text(text, encoding="utf-8")
    wanted = json.loads(run("predict", cars, tmp_path / "new.csv", "--samples", "4", "--json")[1])
    told = table.post("/predict", json={"rows": rows}).raise_for_status().json()
    for row, own in zip(wanted, told["predictions"], strict=True):
        assert own == {name: pytest.approx(value, rel=1e-5) for name, value in row.items()}
        assert own["lower90"] < own["prediction"] < own["upper90"]


def test_many_threads_get_the_single_threaded_answers(digits: Path) -> None:
    outcome = campaign(tb.load_run(digits), threads=8, requests=12, samples=4)
    assert (outcome.answers, outcome.different, outcome.touched) == (96, 0, [])


def test_health_schema_and_page(pictures: httpx.Client, table: httpx.Client) -> None:
    assert pictures.get("/health").json() == {"status": "ok", "name": "digits", "draws": 4}
    schema = pictures.get("/schema").json()
    assert schema["input"] == {"kind": "image", "shape": [1, 8, 8], "values": "numbers from 0 to 1"}
    assert schema["limits"]["body"] == LIMIT * 2**20
    columns = table.get("/schema").json()["input"]["columns"]
    assert [column["name"] for column in columns] == ["weight", "power", "origin", "doors"]
    assert HOSTILE in columns[2]["levels"]
    assert (
        table.get("/schema").json()["data"] == "table:cars.csv"
    )  # without the folder that it is in
    page = pictures.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "'unsafe" not in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "")
    for path in ("/docs", "/redoc", "/openapi.json", "/../pyproject.toml", "/page/index.html"):
        assert pictures.get(path).status_code == 404


JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=x"}
BLANK = [[[0.0] * 8] * 8]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side: int) -> bytes:
    """Return a PNG of a few kB that claims side × side pixels."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * 1_000_000, 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def form(content: bytes, name: str = "file") -> bytes:
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'
    return head.encode() + content + b"\r\n--x--\r\n"


BAD_JSON: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "the body is empty"),
    "no JSON": (b"{", 400, "not valid JSON"),
    "not UTF-8": (b'{"inputs": "\xff"}', 400, "not valid JSON"),
    "deep": (b"[" * 100_000, 400, "not valid JSON"),
    "NaN": (b'{"inputs": [[[[NaN]]]]}', 400, "NaN is no number"),
    "Infinity": (b'{"inputs": [[[[-Infinity]]]]}', 400, "Infinity is no number"),
    "many digits": (b'{"inputs": [' + b"9" * 5000 + b"]}", 400, "not valid JSON"),
    "a list": (b"[1, 2]", 422, "key 'inputs' alone"),
    "other key": (b'{"input": []}', 422, "key 'inputs' alone"),
    "two keys": (b'{"inputs": [], "x": 1}', 422, "key 'inputs' alone"),
    "none": (b'{"inputs": []}', 422, "at least one example"),
    "text": (b'{"inputs": "abc"}', 422, "at least one example"),
    "number": (b'{"inputs": 3}', 422, "at least one example"),
    "null": (b'{"inputs": [null]}', 422, "numbers in nested lists"),
    "texts": (b'{"inputs": [["1"]]}', 422, "numbers in nested lists"),
    "true": (b'{"inputs": [true]}', 422, "numbers in nested lists"),
    "ragged": (b'{"inputs": [[1, 2], [1]]}', 422, "numbers in nested lists"),
    "objects": (b'{"inputs": [{"a": 1}]}', 422, "numbers in nested lists"),
    "shape": (b'{"inputs": [[1, 2, 3]]}', 422, "shape [3]: expected [1, 8, 8] per example"),
    "huge": (json.dumps({"inputs": [[[[1e300] * 8] * 8]]}).encode(), 422, "too large"),
    "infinite": (b'{"inputs": [[[[1e999]]]]}', 422, "shape"),
    "levels": (json.dumps({"inputs": [[[[255] * 8] * 8]]}).encode(), 422, "divide levels"),
    "negative": (json.dumps({"inputs": [[[[-0.5] * 8] * 8]]}).encode(), 422, "from 0 to 1"),
    "too many": (b'{"inputs": [' + b"0," * 1000 + b"0]}", 413, "1,001 examples"),
}  # fmt: skip

BAD_FORMS: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 400, "the body is empty"),
    "no form": (b"hello", 400, "not a valid form"),
    "no file": (form(b"abc", "other"), 422, "no file in its field 'file'"),
    "no image": (form(b"hello"), 422, "none of the formats PNG, JPEG"),
    "PostScript": (form(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), 422, "none of the formats"),
    "cut short": (form(png(torch.rand(8, 8))[:60]), 422, "could not be read"),
    "no pixels": (form(png(torch.rand(8, 8))[:-30]), 422, "could not be read"),
    "bomb": (form(bomb(8000)), 422, "8000 × 8000 pixels are more than"),
    "large bomb": (form(bomb(30000)), 422, "could not be read"),
    "too many": (b"".join(form(b"a")[:-7] for _ in range(70)) + b"--x--\r\n", 400, "not a valid form"),
}  # fmt: skip


def assert_refused(answer: httpx.Response, status: int, part: str) -> None:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    sentence = answer.json()["error"]
    assert part in sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    assert "object at 0x" not in sentence
    assert len(sentence) < 400


@pytest.mark.parametrize("name", list(BAD_JSON))
def test_a_bad_body_gets_one_sentence(pictures: httpx.Client, name: str) -> None:
    body, status, part = BAD_JSON[name]
    assert_refused(pictures.post("/predict", content=body, headers=JSON), status, part)
    assert pictures.get("/health").status_code == 200


@pytest.mark.parametrize("name", list(BAD_FORMS))
def test_a_bad_form_gets_one_sentence(pictures: httpx.Client, name: str) -> None:
    body, status, part = BAD_FORMS[name]
    assert_refused(pictures.post("/predict/image", content=body, headers=FORM), status, part)


def test_bad_rows_get_one_sentence(table: httpx.Client) -> None:
    good = {"weight": 1500, "power": 90, "origin": "US", "doors": 5}
    for rows, part in (
        ([1], "JSON objects"),
        ([{"weight": 1}], "lacks the columns 'power', 'origin', 'doors'"),
        ([good | {"weight": "heavy"}], "'heavy' in column 'weight'"),
        ([good | {"weight": True}], "JSON bool"),
        ([good | {"weight": [1]}], "JSON list"),
        ([good | {"weight": 1e300}], "too far from the training rows"),
    ):
        assert_refused(table.post("/predict", json={"rows": rows}), 422, part)
    assert_refused(table.post("/predict", json={"inputs": [[1]]}), 422, "key 'rows' alone")
    image = {"file": ("a.png", png(torch.rand(8, 8)))}
    assert_refused(table.post("/predict/image", files=image), 404, "takes no images")
    told = table.post("/predict", json={"rows": [good | {"origin": "Mars"}]}).json()
    assert "'Mars'" in told["notes"][0]


def test_wrong_addresses_methods_and_kinds(pictures: httpx.Client) -> None:
    assert_refused(pictures.get("/nothing"), 404, "nothing at this address")
    assert_refused(pictures.get("/predict"), 405, "does not take GET")
    assert_refused(pictures.put("/schema", content=b"x"), 405, "does not take PUT")
    assert_refused(pictures.post("/predict", content=b"{}"), 415, "expected application/json")
    text = {"content-type": "text/plain"}
    assert_refused(pictures.post("/predict", content=b"{}", headers=text), 415, "'text/plain'")
    assert_refused(
        pictures.post("/predict/image", content=b"{}", headers=JSON), 415, "expected multipart"
    )
    packed = JSON | {"content-encoding": "gzip"}
    assert_refused(pictures.post("/predict", content=b"{}", headers=packed), 415, "compressed")
    no_boundary = {"content-type": "multipart/form-data"}
    answer = pictures.post("/predict/image", content=b"{}", headers=no_boundary)
    assert_refused(answer, 400, "not a valid form")
    other = {"host": "evil.example"}
    assert_refused(pictures.get("/schema", headers=other), 400, "the Host of the request")
    assert pictures.get("/health", headers={"host": "127.0.0.1:1"}).status_code == 200


def test_bodies_above_the_limit_with_and_without_a_length(pictures: httpx.Client) -> None:
    body = b" " * (2**18 + 1)
    assert_refused(
        pictures.post("/predict", content=body, headers=JSON), 413, "larger than 262,144"
    )

    def pieces() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 2**15

    answer = pictures.post("/predict", content=pieces(), headers=JSON)  # chunked: no Content-Length
    assert_refused(answer, 413, "larger than 262,144")
    fits = json.dumps({"inputs": [BLANK]}).encode()
    assert (
        pictures.post("/predict", content=iter([fits[:9], fits[9:]]), headers=JSON).status_code
        == 200
    )


def test_a_body_that_does_not_arrive_in_time() -> None:
    sent: list[Any] = []

    async def nothing(*_: Any) -> None:
        raise AssertionError("passed on")

    async def receive() -> Any:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "headers": []}
    asyncio.run(Guard(nothing, 1000, seconds=0.2)(scope, receive, send))
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"]) == {"error": "the body did not arrive within 0.2 seconds"}


def test_a_client_that_goes_away_or_sends_garbage_harms_nobody(pictures: httpx.Client) -> None:
    port = pictures.base_url.port
    for sent in (
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{",
        b"\x16\x03\x01\x00\x01\x00" * 20,
        b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(sent)
    assert pictures.get("/health").status_code == 200


def test_a_run_of_python_that_knows_no_shape(tmp_path: Path) -> None:
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    fitted = tb.fit(torch.nn.Linear(2, 3), (x, x.argmax(1)), "map", epochs=1, progress=False)
    with running(tb.serving.app(fitted)) as address, httpx.Client(base_url=address) as client:
        (row,) = client.post("/predict", json={"inputs": [[0.1, 0.2]]}).json()["predictions"]
        assert list(row["probabilities"]) == ["0", "1", "2"]
        answer = client.post("/predict", json={"inputs": [[0.1, 0.2, 0.3]]})
        assert_refused(answer, 422, "the network cannot take these inputs")


def test_a_port_that_is_taken_and_what_is_not_installed(
    run, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, error = run("serve", digits, "--port", port)
    assert code == 2
    assert error.startswith(f"torchbayes: cannot listen on 127.0.0.1, port {port} (")
    assert run("serve", digits, "--max-body", "0")[2].startswith("torchbayes: max_body is 0 MB")
    for missing in ("fastapi", "uvicorn", "python_multipart"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            patch.delitem(sys.modules, "torchbayes.serving.application", raising=False)
            patch.delitem(sys.modules, "torchbayes.serving.server", raising=False)
            patch.delattr(tb.serving, "server", raising=False)
            code, _, error = run("serve", digits)
        assert code == 2
        assert "pip install 'torchbayes[serve]'" in error, error


def _serve(folder: str, out: Any) -> None:
    sys.argv = ["torchbayes", "serve", folder, "--port", "0", "--samples", "2"]
    with open(out, "w", encoding="utf-8", buffering=1) as sys.stdout:
        from torchbayes.cli import main

        main()


def test_ctrl_c_ends_the_server_in_peace(digits: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    process = forkserver().Process(target=_serve, args=(str(digits), str(out)))
    process.start()
    try:
        for _ in range(600):
            if out.exists() and "http://" in out.read_text(encoding="utf-8"):
                break
            process.join(0.1)
        address = out.read_text(encoding="utf-8").split(" at ")[1].split()[0]
        assert httpx.get(f"{address}/health", timeout=60).json()["status"] == "ok"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 0
        assert out.read_text(encoding="utf-8").endswith("stopped\n")
    finally:
        process.kill()


def test_a_run_of_several_numbers_is_answered_with_a_sentence() -> None:
    x = torch.randn(20, 2)
    run = tb.fit(torch.nn.Linear(2, 3), (x, x @ torch.randn(2, 3)), epochs=1, progress=False)
    with pytest.raises(RequestError, match="an example has 3 numbers") as caught:
        Service(run, 2).arrays([[0.5, -0.5]])
    assert caught.value.status == 501
