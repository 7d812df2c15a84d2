"""No test of this folder starts a container with more rights than a pod in a restricted namespace."""

from __future__ import annotations

import sys

from tests.support import pods

sys.addaudithook(pods.refuse_others)
