"""Safety checks while another thread imports modules: they do not affect each other."""

from __future__ import annotations

import sys

from tests.support import processes

#: Arguments: a folder of modules to import meanwhile, and images with the names of their formats.
SCRIPT = """
import importlib, pathlib, sys, threading

folder, *images = sys.argv[1:]
from cdi_worker.formats import detect, safety

pairs = zip(images[::2], images[1::2])
heads = [(name, pathlib.Path(path).read_bytes()[: detect.HEAD]) for name, path in pairs]
names = [path.stem for path in pathlib.Path(folder).glob("*.py")]
sys.path.insert(0, folder)
sys.setswitchinterval(1e-6)
begun, over, failures = threading.Event(), threading.Event(), []

def load():
    try:
        while not over.is_set():
            for name in names:
                importlib.import_module(name)
            begun.set()
            for name in names:
                del sys.modules[name]
    except BaseException as err:
        failures.append(err)

thread = threading.Thread(target=load)
thread.start()
begun.wait()
before = {name: module for name, module in sys.modules.copy().items() if name not in names}
try:
    for name, head in heads:
        safety.check(name, head)
finally:
    over.set()
    thread.join()
assert not failures, failures
assert all(sys.modules[name] is module for name, module in before.items())
"""


def test_safety_check_does_not_affect_imports_of_other_threads(disks, tmp_path):
    for number in range(1000):
        (tmp_path / f"loaded_{number}.py").write_text("")
    variants = {"qcow2": "qcow2", "vmdk": "vmdk-stream", "vdi": "vdi", "vhd": "vhd"}
    images = [part for name, variant in variants.items() for part in (name, str(disks.image(variant)))]
    processes.run(sys.executable, "-c", SCRIPT, tmp_path, *images)
