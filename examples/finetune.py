"""Fine-tune a causal language model, or an encoder as a classifier, from a local folder; needs 'instep[hf]'.

instep run -n 2 SCRIPT --weights FOLDER --data pairs.jsonl                   prompt -> completion
instep run -n 2 SCRIPT --weights FOLDER --data pairs.jsonl --lora            adapters alone (pip install peft)
instep run -n 2 SCRIPT --weights FOLDER --data FOLDER --task classify --columns text label
torchrun --nproc-per-node 2 SCRIPT ...                                       or python SCRIPT ...

FOLDER has what save_pretrained() writes: config, weights, tokenizer. Nothing is read from the network.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from torch.nn.functional import cross_entropy

import instep

IGNORED = -100  # the label of a token without a loss
TASKS = {
    "causal": (transformers.AutoModelForCausalLM, ["prompt", "completion"], "CAUSAL_LM"),
    "classify": (transformers.AutoModelForSequenceClassification, ["text", "label"], "SEQ_CLS"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="folder of save_pretrained()")
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file, or a folder of SPLIT.jsonl")
    parser.add_argument("--split", default="train", help="which file of the folder")
    parser.add_argument("--task", choices=TASKS, default="causal")
    parser.add_argument("--columns", nargs=2, help="what is read, and what is learnt")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 8, freeze the rest")
    parser.add_argument("--context", type=int, default=0, help="longest pair in tokens")
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="pairs in a step")
    parser.add_argument("--micro-batch", type=int, default=4, help="pairs that are computed at once")
    parser.add_argument("--config-out", default="runs/finetune-config", help="folder for instep convert")
    return parser.parse_args()


def listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    more = [f"and {len(names) - 12} more"] if len(names) > 12 else []
    return ", ".join(names[:12] + more) or "nothing"


def require_weights(folder: Path) -> None:
    """Exit with a sentence unless the folder has what ``from_pretrained`` needs."""
    if not folder.is_dir():
        raise SystemExit(f"--weights {folder} is no folder: expected one that save_pretrained() has written")
    needed = {
        "config": ["config.json"],
        "weights": ["*.safetensors", "*.bin"],
        "tokenizer": ["tokenizer.json", "vocab.*", "*.model"],
    }
    for what, patterns in needed.items():
        if not any(path for pattern in patterns for path in folder.glob(pattern)):
            names = " or ".join(patterns)
            raise SystemExit(f"--weights {folder} has no {what} ({names}), it has: {listed(folder)}")


def read_rows(path: Path, split: str, columns: list[str]) -> list[tuple[str, str]]:
    if path.is_dir():
        if not (path / f"{split}.jsonl").is_file():
            raise SystemExit(f"--data {path} has no split {split}.jsonl, it has: {listed(path)}")
        path = path / f"{split}.jsonl"
    if not path.is_file():
        raise SystemExit(f"--data {path} is not there: expected a .jsonl file, or a folder of them")
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if not rows:
        raise SystemExit(f"{path} is empty: expected a JSON object on each line")
    for number, row in enumerate(rows, start=1):
        for column in columns:
            if column not in row:
                raise SystemExit(f"{path}:{number} has no column {column!r}, it has: {', '.join(row)}")
    return [(str(row[columns[0]]), str(row[columns[1]])) for row in rows]


def tokens_of(
    rows: list[tuple[str, str]], tokenizer, classes: list[str]
) -> list[tuple[list[int], list[int]]]:
    """Input tokens and labels of each pair: one label per token, or (``classes``) one for the pair."""
    if classes:
        return [(tokenizer(text)["input_ids"], [classes.index(label)]) for text, label in rows]
    pairs = []
    for prompt, completion in rows:
        first = tokenizer(prompt)["input_ids"]
        last = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        pairs.append((first + last, [IGNORED] * len(first) + last))
    return pairs


args = arguments()
auto, columns, peft_task = TASKS[args.task]
require_weights(args.weights)
rows = read_rows(args.data, args.split, args.columns or columns)
classes = sorted({label for _, label in rows}) if args.task == "classify" else []
tokenizer = transformers.AutoTokenizer.from_pretrained(args.weights, local_files_only=True)
pairs = tokens_of(rows, tokenizer, classes)

config = transformers.AutoConfig.from_pretrained(args.weights, local_files_only=True)
if classes:
    config.num_labels, config.id2label = len(classes), dict(enumerate(classes))
    config.label2id = {name: i for i, name in enumerate(classes)}
limit = min(getattr(config, "max_position_embeddings", None) or 10**9, tokenizer.model_max_length)
longest = max(len(tokens) for tokens, _ in pairs)
context, why = min(
    (args.context or 10**9, "--context"),
    (longest, "the longest pair"),
    (limit, "the most that the model takes"),
)
num_cut = sum(len(tokens) > context for tokens, _ in pairs)
pairs = [(tokens[:context], labels if classes else labels[:context]) for tokens, labels in pairs]
pairs = [pair for pair in pairs if set(pair[1]) != {IGNORED}]  # of which only the prompt is left
num_empty = len(rows) - len(pairs)
lr = args.lr or (2e-4 if args.lora else 2e-5)
notes = [
    f"context {context} tokens: {why}; {num_cut} of {len(rows)} pairs were cut at it",
    *([f"{num_empty} pairs were left out: the cut left no token to learn"] if num_empty else []),
    f"lr {lr:g}; usual are 1e-5 to 5e-5 for full fine-tuning, 1e-4 to 3e-4 for LoRA",
]

torch.manual_seed(0)  # the same adapters, or the same head, in every process
net = auto.from_pretrained(args.weights, config=config, dtype=torch.float32, local_files_only=True)
if args.lora:
    import peft

    net = peft.get_peft_model(net, peft.LoraConfig(task_type=peft_task, target_modules="all-linear"))
net.train()


def collate(samples: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Padded to the longest of the micro-batch."""
    pad = {"input_ids": tokenizer.pad_token_id or 0, "attention_mask": 0, "labels": IGNORED}
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels} for ids, labels in samples]
    padded = {}
    for name, value in pad.items():
        length = max(len(row[name]) for row in rows)
        padded[name] = torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])
    return padded


def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum over the tokens, or the pairs, that are learnt."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    if not classes:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:]
    return cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def num_learnt(batch: dict[str, torch.Tensor]) -> int:
    return int((batch["labels"] if classes else batch["labels"][:, 1:]).ne(IGNORED).sum())


run = instep.Run("runs/finetune", checkpoint={"every": 100, "frozen": not args.lora})
model = instep.DataParallel(net, run.mesh)  # too large for a rank: instep.fully_shard(net, run.mesh)
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=lr)
lengths = [len(tokens) for tokens, _ in pairs]
data = instep.Loader(
    pairs, args.batch, args.micro_batch, collate_fn=collate, weigh=num_learnt, lengths=lengths
)

for step in run.steps(data.num_steps(args.epochs), model=model, optimizer=optimizer, data=data):
    if run.rank == 0 and notes:  # before this loop there are no ranks
        print("\n".join(notes))
        notes.clear()
    with step:
        losses, counts = [], []
        for micro_batch in model.micro_batches(data):
            loss, count = loss_of(micro_batch.data), num_learnt(micro_batch.data)
            loss.backward()
            losses.append(loss.detach() / max(count, 1))
            counts.append(count)
        instep.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step.log(loss=instep.mean(losses, weights=counts))

if run.rank == 0:  # what instep convert adds to the weights
    tokenizer.save_pretrained(args.config_out)
    config.save_pretrained(args.config_out)
    if args.lora:
        net.peft_config["default"].save_pretrained(args.config_out)
    print(f"instep convert RUN --to transformers --weights {args.config_out} --out FOLDER")
