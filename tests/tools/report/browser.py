"""A headless Chromium that is told what to do through its DevTools protocol, and says what a page
did."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.patience import PATIENCE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SILENT_S = 90.0
"""A page is loaded, and shown, in less; one Chromium of some hundred says nothing more."""


class Browser:
    """One browser with one page. A context manager.

    Attributes:
        requests: addresses that the page asked for, itself included.
        messages: what it wrote to the console, errors and what the browser complained about.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ids, self._started = folder, 0, 0
        self._patience_s = PATIENCE_S
        self.requests: list[str] = []
        self.messages: list[str] = []

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._open, self._session = ExitStack(), None
        self._started += 1
        profile = self._folder / str(self._started)
        profile.mkdir(parents=True)
        self._process = subprocess.Popen(
            # /dev/shm may be small in a container, and full of Ray's objects; a page that its
            # browser takes for one in the background gets no frames, and what waits for a frame
            # then waits for ever
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-renderer-backgrounding",
                "--disable-backgrounding-occluded-windows",
                "--disable-background-timer-throttling",
                "--remote-debugging-port=0",
                "--no-first-run",
                "--disable-background-networking",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + PATIENCE_S
            while not (port_file.is_file() and "\n" in port_file.read_text()):
                assert self._process.poll() is None and time.monotonic() < deadline, (
                    "Chromium does not start"
                )
                time.sleep(0.02)
            port, path = port_file.read_text().splitlines()[:2]
            self._socket: ClientConnection = self._open.enter_context(
                connect(f"ws://127.0.0.1:{port}{path}", max_size=None, compression=None, proxy=None)
            )
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network", "Inspector"):
                self._call(f"{domain}.enable")
            self._call("Page.bringToFront")
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Loads a file in a window of that size, and waits until it is shown. Starts a silent
        Chromium anew, once."""
        self._patience_s = SILENT_S
        try:
            self._load(page, width, height)
        except TimeoutError:
            self.__exit__()
            self.__enter__()
            self._load(page, width, height)
        finally:
            self._patience_s = PATIENCE_S

    def _load(self, page: Path, width: int, height: int) -> None:
        self.resize(width, height)
        self._loaded = False
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:  # which may come before the answer to the call
            self._receive()
        self.value("new Promise(shown => requestAnimationFrame(() => shown()))")

    def resize(self, width: int, height: int = 900) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def value(self, script: str) -> Any:
        """What a script comes to; promises are waited for."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def prefer(self, scheme: str) -> None:
        """The reader's setting of ``light`` or ``dark``."""
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """With the mouse's button down; without it if both places are the same."""
        self._mouse("mouseMoved", start)
        if start != end:
            self._mouse("mousePressed", start)
            self._mouse("mouseMoved", end)
            self._mouse("mouseReleased", end)

    def _mouse(self, kind: str, place: tuple[float, float]) -> None:
        button = "none" if kind == "mouseMoved" else "left"
        self._call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=place[0],
            y=place[1],
            button=button,
            clickCount=1,
        )

    def screenshot(self, path: Path) -> None:
        """The whole page, as it scrolls."""
        size = self.value(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        answer = self._call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._ids += 1
        session = {"sessionId": self._session} if self._session else {}
        self._socket.send(
            json.dumps({"id": self._ids, "method": method, "params": parameters, **session})
        )
        while (message := self._receive()).get("id") != self._ids:
            pass
        assert "error" not in message, f"{method}: {message['error']}"
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv(timeout=self._patience_s))
        what, told = message.get("method", ""), message.get("params", {})
        assert what not in ("Inspector.targetCrashed", "Inspector.detached"), (
            f"the page is gone: {message}"
        )
        if what == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif what == "Page.loadEventFired":
            self._loaded = True
        elif what == "Log.entryAdded":
            self.messages.append(told["entry"]["text"])
        elif what in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.messages.append(json.dumps(told))
        return message
