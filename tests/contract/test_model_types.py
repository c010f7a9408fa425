"""A draw of transformers' types: each loads as ``from_pretrained`` loads it, or says why it is not tried."""

import json
import os
import subprocess
import sys
from pathlib import Path

import outside
import pytest
from snapshots import Compare

DRAWN = {
    "by-day": (
        "beam,blip-2,chinese_clip_vision_model,deit,glm4v_moe_vision,groupvit_text_model,luke,nougat,olmo,"
        "phimoe,qwen2_5_omni_text,zaya"
    ),
    "at-night": (
        "audioflamingo3_encoder,bigbird_pegasus,canine,cohere2_vision,doge,donut-swin,edgetam_prompt_encoder,"
        "idefics3,inkling2,jev,lw_detr,minimax_m3_vl,mlcd_vision_model,mllama,mobilenet_v1,"
        "nemotron3_5_transcribe_audio,nllb-moe,owlv2_vision_model,pi0,qwen2_5_omni_talker,rt_detr,sam3,"
        "textnet,timm_wrapper,upernet,vaultgemma,vits,xlm-roberta"
    ),
}
SAID = 60
"""Characters of a reason that are kept: what follows is a library's own text."""


@pytest.mark.parametrize("when", ["by-day", pytest.param("at-night", marks=pytest.mark.nightly)])
def test_the_outcomes_of_drawn_types(when: str, tmp_path: Path, same: Compare) -> None:
    script = outside.ROOT / "benchmarks" / "model_types.py"
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmarks/model_types.py drawn -->\n<!-- end -->\n")
    words = ("--all", "--types", DRAWN[when], "--work", str(tmp_path), "--out", str(page))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *words],
        check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = (tmp_path / "drawn-0.jsonl").read_text().splitlines()
    text = ""
    for one in map(json.loads, lines):
        loads = f"not tried: {one['reason'][:SAID]}" if one["reason"] else "equal"
        outputs_are = ", outputs equal" if one["outputs"] == "equal" else ""
        unequal = "; ".join((*one["unequal"], *one["storage"]))
        text += f"{one['name']}: {one['architecture'] or '-'}: {unequal or loads}{outputs_are}\n"
    assert text.count("\n") == len(lines) == len(DRAWN[when].split(","))
    loaded = text.count(": equal")
    told = page.read_text()
    assert f"We drew {len(lines)} of " in told
    assert f" {len(lines) - loaded} could not be compared. In {4 * loaded} pairs of loads, the other {loaded} are equal;" in told  # fmt: skip
    same(f"types/{when}.txt", text)
