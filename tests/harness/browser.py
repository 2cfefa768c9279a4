"""Headless Chromium through its WebDriver (W3C WebDriver over HTTP, no package needed): for pages that ringopt writes.

Debian: `apt-get install chromium chromium-driver`. `missing()` says what a test is skipped for where there is none.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of the specification
KEYS = {
    "Enter": "\ue007", "Escape": "\ue00c", "ArrowLeft": "\ue012", "ArrowRight": "\ue014", "ArrowUp": "\ue013",
    "ArrowDown": "\ue015", "Tab": "\ue004", "End": "\ue010", "Home": "\ue011", "PageUp": "\ue00e", "PageDown": "\ue00f",
}  # fmt: skip
# Without a network: what Chromium asks for by itself is refused, many times at each start.
QUIETLY = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,900",
)  # fmt: skip


def missing() -> str:
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not installed" if lacking else ""


class Browser:
    """One window. Selectors are CSS; what cannot be found or clicked raises RuntimeError."""

    def __init__(self, address: str, profile: str, traced: bool = False):
        self.address = address
        options: dict[str, Any] = {"args": [*QUIETLY, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL", "performance": "ALL"}
        if traced:
            options["perfLoggingPrefs"] = {"traceCategories": "devtools.timeline,blink.user_timing"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        session = self.ask("POST", "session", {"capabilities": {"alwaysMatch": wanted}})
        self.address = f"{address}/session/{session['sessionId']}"

    def ask(self, method: str, command: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self.address}/{command}".rstrip("/"), data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{command}: {json.load(error)['value']['message']}") from None

    def open(self, page: Path) -> None:
        self.ask("POST", "url", {"url": page.as_uri()})

    def resize(self, width: int, height: int) -> None:
        """What the page has, in pixels of a style sheet; a window cannot be as narrow as a telephone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)

    def cdp(self, command: str, **parameters: Any) -> Any:
        """A command of the Chrome DevTools Protocol."""
        return self.ask("POST", "goog/cdp/execute", {"cmd": command, "params": parameters})

    def accessibility(self) -> list[dict[str, Any]]:
        """The nodes of the page as a screen reader has them."""
        nodes: list[dict[str, Any]] = self.cdp("Accessibility.getFullAXTree")["nodes"]
        return nodes

    def run(self, script: str, *given: Any) -> Any:
        """The value of a JavaScript function body, which finds what it is `given` in `arguments`."""
        return self.ask("POST", "execute/sync", {"script": script, "args": given})

    def texts(self, selector: str) -> list[str]:
        """What a person reads in the elements, in order; "" of hidden ones."""
        return [str(self.ask("GET", f"element/{name}/text")) for name in self.elements(selector)]

    def count(self, selector: str) -> int:
        return len(self.elements(selector))

    def elements(self, selector: str) -> list[str]:
        found = self.ask("POST", "elements", {"using": "css selector", "value": selector})
        return [element[ELEMENT] for element in found]

    def click(self, selector: str) -> None:
        """The first of them, where a person would."""
        self.ask("POST", f"element/{self.elements(selector)[0]}/click")

    def type(self, text: str) -> None:
        """Keys, to whatever has the focus; a name of KEYS is that key."""
        keys = [KEYS[text]] if text in KEYS else list(text)
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def complaints(self) -> list[str]:
        """What is in the console since the last call: errors of scripts, refused requests."""
        return [str(entry["message"]) for entry in self.ask("POST", "se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Addresses asked for since the last call, data: and the page itself included."""
        entries = self.ask("POST", "se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [str(params["request"]["url"]) for params in sent]

    def trace(self) -> list[dict[str, Any]]:
        """The browser's own record of what it did since the last call, as trace events; of one that is traced."""
        entries = self.ask("POST", "se/log", {"type": "performance"})
        messages = (json.loads(entry["message"])["message"] for entry in entries)
        return [message["params"] for message in messages if message["method"] == "Tracing.dataCollected"]

    def screenshot(self, file: Path) -> None:
        file.write_bytes(b64decode(self.ask("GET", "screenshot")))


@contextmanager
def browser(traced: bool = False) -> Iterator[Browser]:
    """A browser that lives as long as the block; `traced`: it records what it does."""
    driver, port = started()
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            window = Browser(f"http://127.0.0.1:{port}", profile, traced)
            try:
                yield window
            finally:
                window.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(timeout=30)


def started() -> tuple[subprocess.Popen[str], str]:
    """A driver and its port, which it picks for one family of addresses and may then find taken in the other."""
    for _ in range(5):
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        for line in driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return driver, found[1]
        driver.wait(timeout=30)
    raise RuntimeError("chromedriver ended five times before it had a port")
