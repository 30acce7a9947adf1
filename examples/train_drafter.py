"""Train an EAGLE-3 drafter for a few steps from a dataset of eaglehs, on the CPU.

    eaglehs demo
    python examples/train_drafter.py demo/dataset --model demo/model --steps 40

The data side is three lines, and the same for Kimi-K2.5:

    for sample in eaglehs.stream("dataset", shuffle_seed=0):    # key, input_ids, loss_mask, layer_<k>, final
        ...
    batch = eaglehs.collate(samples, max_tokens=2048)           # padded together; bfloat16 stays bfloat16

**The shift is the trainer's.** Rows are stored unshifted: `state[t]` is what the target made of token t. At position t
the drafter is given the states of token t and the embedding of token t+1, and predicts what the target predicts at
t+1, which is the distribution of token t+2. So

    inputs      layer states [t],  token [t+1]
    target      softmax(lm_head(final[t+1]))
    counted     where loss_mask[t+2] is 1: the token that is predicted was the assistant's

`final` is after the target's last norm: it goes into the LM head as it is, never through a norm again.

The demo's target has random weights: its text has no sense to learn, so watch the loss fall. With a real target the
agreement is what becomes accepted tokens.

What is left out to stay on a page: training on the drafter's own predictions for further tokens ("training-time
test"), a reduced vocabulary, several GPUs.

Shape legend: B samples, T tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from itertools import chain, count, islice
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, rms_norm, scaled_dot_product_attention, silu

import eaglehs

MAX_TOKENS = 512
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Drafter(nn.Module):
    """One decoder layer over the joined states of the target; embedding and LM head are the target's own, frozen."""

    def __init__(self, embedding_VH: Tensor, head_VH: Tensor, *, num_states: int, num_heads: int = 4) -> None:
        super().__init__()
        H = embedding_VH.shape[1]
        self.num_heads = num_heads
        self.register_buffer("embedding_VH", embedding_VH)
        self.register_buffer("head_VH", head_VH)
        self.join = nn.Linear(num_states * H, H, bias=False)  # EAGLE-3's fc: low, middle and high states to one
        self.qkv = nn.Linear(2 * H, 3 * H, bias=False)
        self.out = nn.Linear(H, H, bias=False)
        self.up_and_gate = nn.Linear(H, 8 * H, bias=False)
        self.down = nn.Linear(4 * H, H, bias=False)

    def forward(self, states_BTL: Tensor, next_ids_BT: Tensor) -> Tensor:
        """Return logits [B, T, V] of the token after `next_ids_BT`; `states_BTL` is [B, T, L * H]."""
        stream_BTH = self.join(states_BTL)
        token_BTH = self.embedding_VH[next_ids_BT]
        stream_BTH = stream_BTH + self._attend(torch.cat([normed(token_BTH), normed(stream_BTH)], dim=-1))
        up, gate = self.up_and_gate(normed(stream_BTH)).chunk(2, dim=-1)
        stream_BTH = stream_BTH + self.down(up * silu(gate))
        return normed(stream_BTH) @ self.head_VH.T

    def _attend(self, both_BT2H: Tensor) -> Tensor:
        # Causal attention alone: padding stands at the end, so no real token ever sees it.
        B, T, _ = both_BT2H.shape
        q, k, v = self.qkv(both_BT2H).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1))


def normed(x: Tensor) -> Tensor:
    """Return `x` with rows of mean square 1."""
    return rms_norm(x, x.shape[-1:])


def drafter_loss(drafter: Drafter, batch: Mapping[str, Tensor], layers: list[str]) -> tuple[Tensor, float]:
    """Return how far the drafter is from the target (KL, 0 = equal), and on which share of tokens they agree."""
    states_BTL = torch.cat([batch[layer] for layer in layers], dim=-1)[:, :-2].float()
    next_ids_BT = batch["input_ids"][:, 1:-1]
    is_counted_BT = batch["loss_mask"][:, 2:].bool()
    with torch.no_grad():
        target_BTV = batch["final"][:, 1:-1].float() @ drafter.head_VH.T
    drafted_NV = log_softmax(drafter(states_BTL, next_ids_BT)[is_counted_BT], dim=-1)
    target_NV = log_softmax(target_BTV[is_counted_BT], dim=-1)
    agreement = (drafted_NV.argmax(-1) == target_NV.argmax(-1)).float().mean()
    return kl_div(drafted_NV, target_NV, reduction="batchmean", log_target=True), agreement.item()


def batches(dataset: str, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of the dataset for ever, each epoch in another order."""
    samples = _samples_of_all_epochs(dataset)
    while True:
        yield eaglehs.collate(list(islice(samples, batch_size)), max_tokens=MAX_TOKENS)


def _samples_of_all_epochs(dataset: str) -> Iterator[dict[str, Tensor]]:
    stream = eaglehs.stream(dataset, shuffle_seed=0)
    for epoch in count():
        stream.set_epoch(epoch)
        yield from stream


def read_weights(model: Path) -> tuple[Tensor, Tensor]:
    """Return the target's embedding and LM head, float32 [V, H]."""
    with safe_open(model / "model.safetensors", "pt") as weights:
        return weights.get_tensor(EMBEDDING).float(), weights.get_tensor(HEAD).float()


def train(dataset: str, model: Path, *, steps: int, batch_size: int = 8, seed: int = 0) -> list[float]:
    """Train a new drafter and return the loss of each step."""
    torch.manual_seed(seed)
    stream = batches(dataset, batch_size)
    first = next(stream)
    layers = [name for name in first if name.startswith("layer_")]
    drafter = Drafter(*read_weights(model), num_states=len(layers))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step, batch in enumerate(islice(chain([first], stream), steps), start=1):
        loss, agreement = drafter_loss(drafter, batch, layers)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        print(
            f"step {step:4d}  loss {loss.item():.3f}  agrees with the target on {agreement:.1%} of tokens", flush=True
        )
    return losses


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dataset", help="folder or Hub name of a packed dataset")
    parser.add_argument("--model", type=Path, required=True, help="folder of the target, for its LM head")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    losses = train(arguments.dataset, arguments.model, steps=arguments.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
