"The broken variants of fixtures/stories/broken.py: the model that they break is the engine's, and each one differs."

import importlib.util

import numpy as np
import pytest
from common import EXPECTED, ORACLE, ROOT

import k3lib

spec = importlib.util.spec_from_file_location("broken", ROOT / "fixtures" / "stories" / "broken.py")
broken = importlib.util.module_from_spec(spec)
spec.loader.exec_module(broken)
