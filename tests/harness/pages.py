"""What a page of ringopt holds, read without a browser."""

from __future__ import annotations

import json
import re
from typing import Any

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_of(page: str) -> Any:
    """The data that its scripts draw."""
    [found] = DATA.findall(page)
    return json.loads(found)
