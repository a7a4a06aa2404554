"""Train a small generative adversarial network on scikit-learn's handwritten digits.

    ./horovodrun_elastic.sh --example gan

Read main() first. Two optimizers train in turns: each step has a phase for the discriminator `d`
and one for the generator `g`. Both are parts of one model, and the noise comes from the random
numbers of the micro-batch, so the digits are the same for every number of workers.

Expected: after 1500 steps the images look like digits. `--show` prints one, in characters.

Source: the losses are those of Goodfellow et al., 2014, section 3 (the second form, that does not
saturate), with convolutions and BatchNorm as in DCGAN (Radford et al., 2015, section 3).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.utils.data import Dataset, TensorDataset

from elastic_trainer import Trainer

NOISE = 16
INK = " .:-=+*#%@"


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)  # every worker builds the same weights
    gan = Gan()
    rate, betas = options.learning_rate, (0.5, 0.999)
    trainer = Trainer(
        gan,
        {"d": torch.optim.Adam(gan.discriminator.parameters(), lr=rate, betas=betas),
         "g": torch.optim.Adam(gan.generator.parameters(), lr=rate, betas=betas)},
        digits(), global_batch=options.global_batch, microbatches=options.microbatches,
        until=f"{options.steps} steps", seed=options.seed,
        checkpoint_every=options.checkpoint_every)
    for step in trainer:
        for real, in step.phase("d"):
            step.backward(gan.loss_d(real))
        for real, in step.phase("g"):
            step.backward(gan.loss_g(len(real)))
        if step.every("250 steps") and trainer.is_first:
            print(f"step {step.number + 1}: loss of d {step.losses['d']:.3f}, of g "
                  f"{step.losses['g']:.3f}", flush=True)
    if trainer.is_first:
        print(f"trained {trainer.result.steps} steps on {trainer.result.samples} images")
        if options.show:
            print(as_text(gan.sample(options.seed)))


class Gan(nn.Module):
    """A generator of images (n, 1, 8, 8) and the discriminator that judges them."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 2 * width * 2 * 2), nn.Unflatten(1, (2 * width, 2, 2)),
            nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1), nn.Sigmoid())
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(2 * width * 2 * 2, 1))

    def made(self, count: int) -> Tensor:
        """Return new images, of noise from torch's generator."""
        noise = torch.randn(count, NOISE, device=next(self.parameters()).device)
        images: Tensor = self.generator(noise)
        return images

    def loss_d(self, real: Tensor) -> Tensor:
        """Return the discriminator's loss: real images are 0.9 real, and its own are not."""
        with torch.no_grad():
            false = self.made(len(real))
        judged: Tensor = self.discriminator(real)
        return (binary_cross_entropy_with_logits(judged, torch.full_like(judged, 0.9))
                + softplus(self.discriminator(false)).mean())

    def loss_g(self, count: int) -> Tensor:
        """Return the generator's loss: its images are to be judged real."""
        return softplus(-self.discriminator(self.made(count))).mean()

    def sample(self, seed: int) -> Tensor:
        """Return one image (8, 8), with the running statistics of BatchNorm."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(1, NOISE, generator=generator)
        self.eval()
        with torch.no_grad():
            image: Tensor = self.generator(noise.to(next(self.parameters()).device))
        return image[0, 0].cpu()


def digits() -> Dataset[tuple[Tensor, ...]]:
    """Return the images (1, 8, 8), pixels from 0 to 1."""
    from sklearn.datasets import load_digits  # here, because it takes a second

    pixels, _ = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16)


def as_text(image: Tensor) -> str:
    """Draw an image in characters, two for each pixel."""
    rows = (image.clamp(0, 1) * (len(INK) - 1)).round().int().tolist()
    return "\n".join("".join(2 * INK[value] for value in row).rstrip() for row in rows)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GAN on scikit-learn's digits.")
    add = parser.add_argument
    add("--steps", type=int, default=1500,
        help="steps, each with an update of both nets (%(default)s)")
    add("--global-batch", type=int, default=64, help="images per step, over all workers")
    add("--microbatches", type=int, default=4,
        help="parts of the global batch: the largest number of workers. BatchNorm works on one "
             "part")
    add("--learning-rate", type=float, default=1e-3, help="of both optimizers (%(default)s)")
    add("--seed", type=int, default=0,
        help="for the weights, the order of the samples, and the noise")
    add("--show", action="store_true", help="print a made digit at the end")
    add("--checkpoint-every", default="auto",
        help='steps (50), seconds ("30s"), "auto", "0.5%%" of the time, 0: last')
    return parser.parse_args()


if __name__ == "__main__":
    main()
