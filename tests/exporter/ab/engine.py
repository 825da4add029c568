"""``python engine.py serve --port N [--FAULT]``: records a startup as vLLM would, then serves completions.

Faults: ``--die`` runs out of memory while it loads, ``--hang`` never becomes ready, ``--stubborn`` ignores
the signals that ask it to end and has a child in a session of its own, ``--refuse`` answers no prompt,
``--unrecorded`` writes no record, ``--infinite`` answers as vLLM does where a log-probability is not finite,
``--other`` has other weights, ``--noise`` speaks no HTTP, ``--cut`` breaks its answers off, ``--words``
answers with words in the place of token ids, ``--daemon`` goes on as a daemon. ``python engine.py script``
generates by itself and ends, with ``--fail`` with exit code 3, with ``--torn`` with half a line of outputs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent.parent))

from loadpeak.record import EngineSettings, WeightHashes, WeightsHashed
from loadpeak.run_folder import whereabouts
from tests.exporter.building import Startup

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


def record() -> None:
    """A startup in the run that was asked for."""
    boot_id, pid_namespace = whereabouts()
    startup = Startup(
        Path(os.environ["LOADPEAK_HOME"]),
        os.environ["LOADPEAK_RUN_ID"],
        release=os.environ["LOADPEAK_CACHE_RELEASE"],
        variant=os.environ["LOADPEAK_VARIANT"],
        experiment=os.environ["LOADPEAK_EXPERIMENT"],
        pid=os.getpid(),
        at=time.monotonic(),
        boot_id=boot_id,
        pid_namespace=pid_namespace,
    )
    if "--hang" in sys.argv:
        startup.session.start_phase("load_weights")
        print("hanging", flush=True)
        time.sleep(600)
    startup.load(retries=False)
    if "--die" in sys.argv:
        startup.session.failed(RuntimeError(OOM))
        raise SystemExit(1)
    startup.ready()
    if os.environ["LOADPEAK_EVIDENCE"] == "on":
        now = time.monotonic()
        weight = "abd" if "--other" in sys.argv else "abc"
        startup.journal.append(EngineSettings(at_seconds=now, settings={"dtype": "bf16"}))
        startup.journal.append(WeightHashes(at_seconds=now, module="", hashes={"w": weight}))
        startup.journal.append(WeightsHashed(at_seconds=now, tensors=1, size_bytes=4, duration_seconds=0.1))


class Handler(BaseHTTPRequestHandler):
    """The part of the OpenAI API that is asked for."""

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "--refuse" in sys.argv:
            self.answer(400, {"error": {"message": "This prompt\nis too long."}})
            return
        assert asked["temperature"] == 0
        assert asked["return_token_ids"] is True
        tokens = ["one", "two"] if "--words" in sys.argv else [len(asked["prompt"])] * 2
        choice = {
            "token_ids": tokens,
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-0.5, -9999.0 if "--infinite" in sys.argv else -0.25]},
        }
        self.answer(200, {"choices": [choice]})

    def answer(self, status: int, body: object) -> None:
        if "--noise" in sys.argv:
            self.wfile.write(b"SSH-2.0\r\n")
            return
        data = json.dumps(body).encode()
        self.send_response(status)
        more = 100 if "--cut" in sys.argv and self.command == "POST" else 0
        self.send_header("Content-Length", str(len(data) + more))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def main() -> None:
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        print("child", child.pid, flush=True)
    else:
        signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    if "--daemon" in sys.argv:
        if os.fork() > 0:
            os._exit(0)
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
    print("engine", os.getpid(), flush=True)
    if "--unrecorded" not in sys.argv:
        record()
    if sys.argv[1] == "script":
        with Path(os.environ["LOADPEAK_OUTPUTS"]).open("w") as file:
            line = '{"prompt":0,"token_ids":[5,6],"stop_reason":"length","logprobs":[-1,-2]}\n'
            file.write(line[:20] if "--torn" in sys.argv else line)
        raise SystemExit(3 if "--fail" in sys.argv else 0)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
