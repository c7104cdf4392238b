"""Nonsense in: every word of the command refuses it in one line, with what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.cli.exit_codes import USAGE
from instep.cli.plan import main

NONSENSE = [
    ("memory --model.layers -3", "model.layers: expected 1 or more, got -3"),
    ("memory --model.width -8", "model.width: expected 1 or more"),
    ("memory --model.heads 7", "6 heads would, or width 770"),
    ("memory --model.kv-heads 5", "expected a divisor of heads(12), got 5: 4 is one"),
    ("memory --model.dropout nan", "model.dropout: expected a finite number, got nan"),
    ("memory --model.experts 4 --model.top-k 9", "model.top_k: expected 1 to experts(4), got 9"),
    ("memory --parallel.tp 8", "8 ranks cannot share heads(12): 6 can"),
    ("memory --parallel.pp 13", "pass pp=12 or less"),
    ("memory --model.layers 2 --parallel.pp 3", "pass pp=2 or less"),
    ("memory --parallel.pp 4 --parallel.schedule fast", "expected a schedule of naive, gpipe, 1f1b"),
    ("memory --parallel.pp 2 --parallel.cuts 30", "expected 1 of the layers 1 to 11"),
    ("memory --parallel.cuts 3", "one stage has no cuts, got (3,): pass pp"),
    ("memory --parallel.dp 0", "parallel.dp: expected 1 rank or more, got 0"),
    ("memory --parallel.shard 2", "pass stage 1, 2 or 3"),
    ("memory --parallel.ep 2", "pass ep=1"),
    ("memory --model.experts 8 --parallel.ep 6", "expected a divisor of experts(8), got 6: 4 is one"),
    ("memory --parallel.bucket-mb inf", "parallel.bucket_mb: expected a finite number, got inf"),
    ("memory --parallel.dp 4 --batch.global-size 6", "got 6: 4 is one"),
    ("memory --device.memory-gb 0", "expected more than 0"),
    ("memory --device.context-mb -5", "device.context_mb: expected 0 or more, or -1, got -5"),
    ("memory --device.communicator-mb inf", "expected a finite number, got inf"),
    ("memory --recipe float8", "recipe: expected one of float32, autocast"),
    ("memory --moments -1", "moments: expected 0 or more, got -1: AdamW has 2"),
    ("memory nowhere.toml", "nowhere.toml: expected a file, or one of gpt2-small"),
    ("memory a100", "a100: expected a file, or one of gpt2-small, gpt2-xl, gpt3-175b, llama3-8b, llama3-70b, "
     "llama3-405b\n"),
    ("step --cluster.tflops 0", "cluster.tflops: expected more than 0"),
    ("step --cluster.efficiency 2", "efficiency <= 1 and busy from 0 to 1, got 5, 10, 2.0 and 0.0"),
    ("step --cluster.local-us nan", "cluster.local_us: expected a finite number, got nan"),
    ("step --cluster.ranks-per-host 0", "cluster.ranks_per_host: expected more than 0, got 0"),
    ("step --slow-by 0.5", "slow_by and expert_load of 1 or more, got 0.5"),
    ("step h200", "h200: expected a file, or one of gpt2-small"),
    ("scale --ranks 3 --parallel.tp 2", "expected a positive multiple of 2"),
    ("scale --ranks 0", "expected a positive multiple of 1"),
    ("scale --ranks 6 --batch.global-size 64", "got 64: 60 is one"),
    ("search", "batch.global_size: expected the windows of a step, got 0"),
    ("search --ranks 0 --batch.global-size 8", "expected 1 or more, got 0"),
    ("search --ranks 97 --batch.global-size 8", "pass a --batch.global-size that is a multiple of 97"),
    ("search --batch.global-size 64 --price -1", "price: expected 0 or more"),
    ("search --batch.global-size 64 --price nan", "price: expected a finite number, got nan"),
    ("fit nowhere", "nowhere: expected the directory of a run that has ended"),
    ("check nowhere", "nowhere: expected the directory of a run that has ended"),
    ("check", "expected the directory of one run or more, got none"),
    ("fast", "expected one of memory, step, scale"),
]  # fmt: skip
FILES = [
    ("layers = 3", "plan.toml: unknown key 'layers': did you mean 'model.layers'?"),
    ("[modle]\nlayers = 3", "unknown key 'modle': did you mean 'model'?"),
    ("[model]\nlayer = 3", "unknown key 'model.layer': did you mean 'model.layers'?"),
    ("model = 3", "model: expected a table, got int 3"),
    ("[model\n", "plan.toml: Expected ']'"),
    ("[model]\nlayers = 2.5", "model.layers: expected int, got float 2.5"),
    ("[model]\nactivation = 'relu'", "model.activation: expected one of gelu, swiglu, none, got 'relu'"),
    ("[parallel]\nstage = 7", "parallel.stage: expected one of 0, 1, 2, 3, got 7"),
    ("[parallel]\nstage = 'three'", "parallel.stage: expected one of 0, 1, 2, 3, got str 'three'"),
    ("[device]\nkind = 'tpu'", "device.kind: expected one of cuda, cpu, got 'tpu'"),
    ("[cluster]\nefficiency = nan", "cluster.efficiency: expected a finite number, got nan"),
]


@pytest.mark.parametrize(("args", "said"), NONSENSE)
def test_nonsense_is_refused_with_what_would_fit(args: str, said: str, capsys) -> None:
    assert main(args.split()) == USAGE
    refused = capsys.readouterr().err
    assert said in refused and refused.count("\n") == 1


@pytest.mark.parametrize(("text", "said"), FILES)
def test_nonsense_in_a_file_is_refused_by_its_key(
    text: str, said: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(text)
    assert main(["step", "plan.toml"]) == USAGE
    refused = capsys.readouterr().err
    assert said in refused and refused.count("\n") == 1


def test_one_file_serves_memory_and_step(tmp_path, capsys) -> None:
    (tmp_path / "plan.toml").write_text("[parallel]\nstage = 3\nshard = 4\n[cluster]\ntflops = 100\n")
    for word in ("memory", "step"):
        assert main([word, str(tmp_path / "plan.toml")]) == 0
    assert "of 100 TFLOP/s" in capsys.readouterr().out
