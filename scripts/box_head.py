"""Puts a trained head into the box: src/outpace/boxed/NAME/, from which it is used without being asked.

    python scripts/box_head.py HEAD MODEL ABOUT.json

HEAD: the folder that `outpace train` wrote. MODEL: a built-in name. ABOUT.json: {"made": {"command", "seed", ...},
"figures": {"held-out prompts, chain of 7": {"chat": 1.7, ...}, ...}}: what box.json and README.md will say of it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from outpace import hub
from outpace.heads import boxed
from outpace.heads.export import export_head
from outpace.heads.loading import load_head
from outpace.json_file import read_json
from outpace.models.loading import load_model

MOST = 16 << 20  # bytes of the file that is committed


def main(head: str, model: str, about_file: str) -> None:
    path = hub.resolve(model)
    target = load_model(path).config
    loaded = load_head(head, target)
    given = read_json(Path(about_file))
    out = boxed.FOLDER / Path(model).name
    out.parent.mkdir(exist_ok=True)
    weights = {name: loaded.weights.take_tensor(name) for name in list(loaded.weights.keys())}
    made = export_head(out, loaded.config, weights, loaded.d2t, hub.upstream(model), target_config=target, force=True)
    size = (out / "model.safetensors").stat().st_size
    if size > MOST:
        sys.exit(f"{out}: {size} bytes are more than the {MOST} that may be committed")
    about = {
        "target": boxed.about_target(path, Path(model).name),
        "head": {
            "kind": loaded.config.algorithm,
            "parameters": sum(math.prod(t.shape) for t in made.tensors.values() if t.kind == "BF16"),
            "bytes": size,
            "draft_vocabulary": loaded.config.draft_vocab_size,
        },
        "made": given["made"],
        "figures": given["figures"],
        "licence": given.get("licence", "Apache-2.0"),
    }
    (out / "box.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(boxed.card(about), encoding="utf-8")
    print(f"wrote {out} ({size / 1e6:.1f} MB)")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
