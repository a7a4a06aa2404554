"""LoRA of rank 8 on a GPT-2 of 124 million parameters with random weights.

    python tests/bench/jobs/lora.py STEPS carried|frozen    alone, or as workers of the launcher
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from elastic_trainer import Trainer

torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config())
model = get_peft_model(
    base, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
texts = [{"input_ids": torch.randint(50257, (8,))} for _ in range(64)]
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
trainer = Trainer(model, torch.optim.AdamW(trained, lr=1e-3), texts, global_batch=4, microbatches=4,
                  until=f"{sys.argv[1]} steps", checkpoint_every=2, reduce="exact",
                  carry_frozen=sys.argv[2] == "carried")
for step in trainer:
    for batch in step:
        step.backward(model(batch["input_ids"], labels=batch["input_ids"]).loss)
print("weights", trainer.result.weights_sha256)
