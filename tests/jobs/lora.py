"""LoRA of rank 8 on a GPT-2 with random weights, of 124 million parameters or small.

    python tests/jobs/lora.py STEPS always|checkpoints|never [small]    alone, or as workers
"""

import sys

import injected
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from elastic_trainer import Trainer

steps, carry_frozen, *size = sys.argv[1:]
if injected.injector:
    injected.injector.linger_at_the_end(int(steps), 0.05 if size else 0.0)
torch.manual_seed(0)
small = {"vocab_size": 1000, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 2,
         "bos_token_id": 0, "eos_token_id": 0}
base = GPT2LMHeadModel(GPT2Config(**(small if size else {})))
model = get_peft_model(
    base, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
texts = [{"input_ids": torch.randint(base.config.vocab_size, (8,))} for _ in range(64)]
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
trainer = Trainer(model, torch.optim.AdamW(trained, lr=1e-3), texts, global_batch=4, microbatches=4,
                  until=f"{steps} steps", checkpoint_every=2, reduce="exact",
                  carry_frozen=carry_frozen, listeners=injected.listeners)
for step in trainer:
    for batch in step:
        step.backward(model(batch["input_ids"], labels=batch["input_ids"]).loss)
print("weights", trainer.result.weights_sha256)
