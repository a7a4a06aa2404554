"""The job of the fault tests of the adapter for transformers: dropout, sentences of different
lengths, a loader process, evaluations, early stopping that never comes, a callback that counts.

    python tests/jobs/finetuning.py       alone: the undisturbed twin
"""

import time

import injected
import torch
from injected import hurry, injector
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from elastic_trainer.adapters.transformers import ElasticTrainer


class Sentences(torch.utils.data.Dataset):
    """Random sentences of 3 to 9 words."""

    def __init__(self, size, first):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if injector and self.first == 0 and not hurry.exists():
            time.sleep(0.2)  # so that a newcomer enters in the middle of the run
        generator = torch.Generator().manual_seed(self.first + i)
        words = torch.randint(1, 50, (9,), generator=generator)
        mask = (torch.arange(9) < 3 + i % 7).long()
        return {"input_ids": words * mask, "attention_mask": mask,
                "labels": torch.where(mask > 0, words, -100)}


class Counter(TrainerCallback, ExportableState):
    """Counts finished steps."""

    def __init__(self):
        self.count = 0

    def on_step_end(self, args, state, control, **_):
        self.count += 1
        assert self.count == state.global_step

    def state(self):
        return {"args": {}, "attributes": {"count": self.count}}


def hits(prediction):
    guesses = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": (guesses == prediction.label_ids[:, 1:]).mean()}


torch.manual_seed(1)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, attention_dropout=0.1, bos_token_id=0, eos_token_id=0))
counter = Counter()
trainer = ElasticTrainer(
    model=model,
    args=TrainingArguments(
        output_dir="unused", use_cpu=True, per_device_train_batch_size=4, num_train_epochs=10,
        gradient_accumulation_steps=2, learning_rate=1e-2, lr_scheduler_type="cosine",
        warmup_steps=0.1, weight_decay=0.1, seed=3, logging_steps=5, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="loss",
        dataloader_num_workers=1),
    train_dataset=Sentences(170, 0), eval_dataset=Sentences(30, 1000), compute_metrics=hits,
    callbacks=[counter, EarlyStoppingCallback(early_stopping_patience=99)], devices=4,
    run_dir=None if injector else "alone", listeners=injected.listeners)
trainer.train()
assert counter.count == trainer.state.global_step == 60, (counter.count, trainer.state)
print("weights", trainer.elastic.result.weights_sha256)
print("best", trainer.state.best_global_step, trainer.state.best_metric, trainer.state.log_history)
