"""`tvmflow verify`: check a bundle without running anything in it but, at the end, its golden sample."""

import json
import os
from pathlib import Path

import click

from tvmflow.errors import VerdictError


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify_command(bundle: Path, as_json: bool) -> None:
    """Check BUNDLE's digests and that this machine can run it, then its golden sample.

    Exit code 3: it runs, and its outputs are not the original's.
    """
    os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    import numpy as np

    from tvmflow import runtime

    with runtime.load(bundle) as model:
        inputs, expected = model.sample
        computed = model(**inputs)
        manifest = model.manifest
    worst = 0.0
    for name, array in expected.items():
        difference = np.abs(computed[name].astype(np.float64) - array.astype(np.float64))
        worst = max(worst, float(np.max(difference, initial=0.0)))
        if not np.allclose(computed[name], array, rtol=1e-2, atol=1e-3, equal_nan=True):
            raise VerdictError(f"bundle {str(bundle)!r}: output {name!r} differs from the original's by {worst:.3g}")
    if as_json:
        document = json.loads(manifest.to_json())
        click.echo(json.dumps({"bundle": str(bundle), "max_abs_error": worst, "manifest": document}))
        return
    click.echo(f"{bundle}: {manifest.name} for {manifest.target}, whole, golden sample within {worst:.1e}")
