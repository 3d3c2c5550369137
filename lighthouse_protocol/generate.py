"""Regenerate lighthouse_protocol/pb from protos/ with pinned tools. `--check` fails if the files are stale.

The descriptors are registered as `lighthouse_protocol/pb/...` to avoid a collision with a project's own
`protos/manager.proto`.

pip install --group generate
python -m lighthouse_protocol.generate [--check]
"""

import argparse
import importlib.resources
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = "lighthouse_protocol/pb"
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(out: pathlib.Path) -> None:
    """Compile every .proto file into `out`/lighthouse_protocol/pb. Raise SystemExit if protoc fails."""
    from grpc_tools import protoc  # pyright: ignore[reportMissingImports]

    well_known = importlib.resources.files("grpc_tools") / "_proto"
    plugins = [
        f"--plugin=protoc-gen-{kind}={pathlib.Path(sys.executable).parent}/protoc-gen-{kind}"
        for kind in ("mypy", "mypy_grpc")
    ]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
    paths = [f"-I{PACKAGE}={ROOT / 'protos'}", f"-I{well_known}"]
    sources = sorted(str(path) for path in (ROOT / "protos").glob("*/*.proto"))
    if protoc.main(["protoc", *plugins, *paths, *outputs, *sources]) != 0:
        raise SystemExit("protoc failed")


def generated(root: pathlib.Path) -> dict[str, str]:
    folder = root / PACKAGE
    return {
        str(path.relative_to(folder)): path.read_text() for pattern in PATTERNS for path in folder.glob(f"*/{pattern}")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a file is stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(pathlib.Path(folder))
        fresh = generated(pathlib.Path(folder))
    present = generated(ROOT)
    stale = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    if stale:
        print(f"stale: {', '.join(stale)}; run python -m lighthouse_protocol.generate", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
