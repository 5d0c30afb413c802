"""Weights kept as the kernels read them: the same bits with and without, and no file, however damaged, can do harm."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import tiny_config, tiny_weights

from outpace import _native, hub
from outpace.backends.base import Rows
from outpace.backends.native import NativeBackend
from outpace.weights import relaid as module
from outpace.weights.relaid import MAGIC, Part, Relaid
