"""Compile the kernel beside the package: objects, then one side module. Run by referee.py in a copy."""

import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNEL = Path("kernel")  # referee.py copies wasm/ here, and writes flags.txt


class BuildKernel(build_py):
    def run(self) -> None:
        flags = (KERNEL / "flags.txt").read_text().split()
        objects = []
        for source in sorted(KERNEL.rglob("*.c")):
            objects.append(str(source.with_suffix(".o")))
            subprocess.check_call(["cc", "-c", *flags, str(source), "-o", objects[-1]])
        subprocess.check_call(["cc", "-shared", *objects, "-o", "expertswarm_verify/libexpert.so"])
        super().run()


class WithBinary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class AnyPython(bdist_wheel):
    """The library is reached through ctypes: any Python of this platform will do."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=WithBinary, cmdclass={"build_py": BuildKernel, "bdist_wheel": AnyPython})
