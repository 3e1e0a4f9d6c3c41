"""A page in headless Chromium, with pointer and keys, by Chromium's own protocol over two pipes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
# Chromium reads commands from descriptor 3 and writes answers to 4.
START = "import os, sys; [os.dup2(int(sys.argv[i]), i + 2) for i in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"


class Page:
    """One page; `problems` are errors and warnings, exceptions, and network addresses that the page requested."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._rest, self._number, self._session = b"", 0, {}
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol; keeps problems that the page reports meanwhile."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._keep(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, path: Path) -> None:
        """Opens a file and waits until it is loaded."""
        self.call("Page.navigate", url=path.as_uri())
        while (answer := self._next()).get("method") != "Page.loadEventFired":
            self._keep(answer)

    def run(self, script: str) -> Any:
        """Gives the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def point(self, selector: str, press: bool = False) -> None:
        """Moves the pointer to the middle of an element; with `press`, also presses the button."""
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = f"(box => [box.x + box.width / 2, box.y + box.height / 2])({place(selector)})"
        x, y = self.run(box)
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if press else ())):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str) -> None:
        """Presses a key such as "Tab" or "ArrowRight"."""
        codes = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name])

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Sets the size of the window, and whether the user wants dark colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._answers.read1(1 << 16)
            assert more, "Chromium ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _keep(self, message: dict[str, Any]) -> None:
        kind, given = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(given["exceptionDetails"]))
        elif (kind == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning")) or kind == "Log.entryAdded":
            self.problems.append(json.dumps(given))
        elif kind == "Network.requestWillBeSent" and not given["request"]["url"].startswith(("file:", "about:")):
            self.problems.append(given["request"]["url"])


def place(selector: str) -> str:
    """Gives the expression for the rectangle of an element."""
    return f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """Starts Chromium with an empty profile in a folder, gives its page, and ends it."""
    assert CHROMIUM is not None
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    command = [sys.executable, "-c", START, str(read_commands), str(write_answers), CHROMIUM, *FLAGS]
    command += [f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, pass_fds=(read_commands, write_answers), stderr=subprocess.DEVNULL)
    os.close(read_commands)
    os.close(write_answers)
    with os.fdopen(commands, "wb", buffering=0) as to_it, os.fdopen(answers, "rb") as from_it:
        try:
            yield Page(to_it, from_it)
        finally:
            process.terminate()
            process.wait(timeout=60)
