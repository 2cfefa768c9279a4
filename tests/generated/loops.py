"""Loops at random: recurrences that are affine in their state, those that are not, and loops that are none.

    S = x.new_zeros(2, 8); T = S; outs = []
    for i in range(x.shape[1]):
        u = x[:, i]
        S = S * u.sigmoid() + u
        outs.append(S * u)
    x = torch.stack(outs, 1)
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.generated.drawing import Drawing, Program
from tests.generated.parts import ATTENTIONS, LOSSES, RETURNS

# Of a state S [B, W], a second one T, and the token u [B, W].
AFFINE = (
    "S = S * 0.9 + u", "S = S * u.sigmoid() + u", "S = S @ (A * 0.3) + u", "S = torch.where(u > 0, S, u)",
    "S = S + u * u * 0.1", "S = S.flip(-1) * 0.5 + u", "S = S.roll(1, -1) * 0.5 + u",
    "S = S - 0.1 * S.mean(-1, keepdim=True) + u", "S = torch.lerp(S, u, 0.3)", "S = torch.addcmul(u, S, u.cos())",
    "S = F.linear(S, A * 0.3) + u", "T = T * 0.5 + S; S = S * 0.9 + u", "S = S * 0.9 + u; T = T * 0.5 + S",
    "S = (S * 0.9 + u) / 1.5", "S = S.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8) * 0.5 + u",
    "S = S.clone().mul_(0.5).add_(u)", "S = S.detach() * 0.5 + u", "S = torch.maximum(S, u)",
    "S = torch.cat([S[:, 1:], u[:, :1]], 1)", "S = S * (i + 1) * 0.2 + u", "S = S * 0.5 + x[:, i - 1]",
    "S = S.cumsum(-1) * 0.1 + u", "S = u", "S = S.masked_fill(u > 0, 0.0) + u", "S = S * 0 + u",
    "S = S.clone(); S[:, 0] = u[:, 0]", "S, T = T, S * 0.8 + u", "T = torch.maximum(T, u); S = S * 0.9 + u * T",
    "S = S + u; S = S * 0.5", "S = torch.stack([S, u]).mean(0)", "S = S.double() + u * 0.2",
    "S = S.unflatten(-1, (2, 4)).flip(1).flatten(1) + u * 0.1", "S = S[:, [1, 0, 3, 2, 5, 4, 7, 6]] * 0.7 + u",
    "S = S - (S * u).sum(-1, keepdim=True) * u * 0.1", "S = S * 0.9 + T * u; T = u.cos()",
    "for j in range(2): S = S * 0.8 + u * x[:, (i + j) % n]",
)  # fmt: skip
NOT_AFFINE = (
    "S = (S + u).tanh()", "S = S * S * 0.1 + u", "S = S * S.mean(-1, keepdim=True).sigmoid() + u",
    "S = torch.where(S > 0, S, u)", "S = F.normalize(S + u, dim=-1)", "S = S.abs() * 0.5 + u",
    "S = S / (1 + S.square()) + u", "S = F.relu(S) + u", "S = S.clamp(-1, 1) + u", "S = S.softmax(-1) * u + u",
    "S = S.sort(-1).values * 0.5 + u", "S = u * (S.argmax(-1, keepdim=True) + 1) * 0.1",
    "S = S * T * 0.1 + u; T = T * 0.5 + S",
    "S = S * (T + u).sigmoid() + u; T = S * 0.5", "S = torch.maximum(S, u) * S * 0.1 + u",
    "S = torch.minimum(S * 0.9, u)", "S = (S + 1).log1p() * 0 + S.sin() + u",
)  # fmt: skip
# Of a state S [B, W, W], with k the token of length 1.
MATRICES = (
    "S = S * 0.9 + k[:, :, None] * u[:, None]",
    "S = S - k[:, :, None] * (k[:, None] @ S) * 0.5 + k[:, :, None] * u[:, None]",
    "S = S * u.sigmoid()[:, None] + k[:, :, None] * u[:, None]", "S = S.mT * 0.5 + k[:, :, None] * u[:, None]",
    "S = A * 0.2 @ S + k[:, :, None] * u[:, None]",
    "S = S + k[:, :, None] * (u - (k[:, None] @ S)[:, 0])[:, None] * 0.5",
    "S = S @ S * 0.01 + k[:, :, None] * u[:, None]",
    "S = S * S.sum(1, keepdim=True).sigmoid() + k[:, :, None] * u[:, None]",
)  # fmt: skip
GIVEN = ("S", "S * u", "S.tanh()", "(S * u).sum(-1, keepdim=True) * u", "S + T", "u * 2", "S.detach() * u", "S - u")
GIVEN_OF_MATRICES = ("(u[:, None] @ S)[:, 0]", "S.sum(1) * u", "(S @ k[:, :, None])[:, :, 0]")
ORDERS = ("range(n)", "range(n)", "reversed(range(n))", "range(n - 1, -1, -1)")
AFTER = ("torch.stack(outs, 1)", "torch.stack(outs[::-1], 1)", "torch.stack(outs, 1) + S.flatten(1)[:, None, :8]",
         "torch.cat([each[:, None] for each in outs], 1)", "x + outs[-1][:, None]")  # fmt: skip


class DrawingLoops(Drawing):
    """A loop or two, and at times an attention."""

    def program(self, most: int) -> Program:
        kinds: list[str] = ["loop"] * self.random.randint(1, most) + ["attention"] * self.random.randint(0, 1)
        self.random.shuffle(kinds)
        for kind in kinds:
            self.add(kind)
        loss = self.random.choice(list(LOSSES.values()))(self.draw(self.shape))
        return Program(tuple(self.lines), (loss, self.random.choice(RETURNS)), self.batch, self.length)

    def line(self, kind: str) -> str:
        if kind == "attention":
            return self.random.choice(list(ATTENTIONS.values())[:4])(self.draw(self.shape))
        if self.random.random() < 0.3:
            return self.loop(f"x.new_zeros({self.batch}, 8, 8)", MATRICES, GIVEN_OF_MATRICES)
        steps = AFFINE if self.random.random() < 0.6 else (*AFFINE, *NOT_AFFINE)
        init = self.random.choice((f"x.new_zeros({self.batch}, 8)", f"x.new_ones({self.batch}, 8) * 0.3", "x[:, 0]"))
        return self.loop(init, steps, GIVEN)

    def loop(self, init: str, steps: Sequence[str], given: Sequence[str]) -> str:
        """At times a parameter of each step: then the steps are layers, and no recurrence."""
        of_step, body = "A = p(8, 8)", [self.random.choice(steps) for _ in range(self.random.choice((1, 1, 2)))]
        inside = self.random.random() < 0.1
        before = [*([] if inside else [of_step]), f"S = {init}; T = S * 1; outs = []; n = x.shape[1]"]
        lines = ["u = x[:, i]; k = F.normalize(u, dim=-1)", *([of_step] if inside else []), *body]
        lines.append(f"outs.append({self.random.choice(given)})")
        if self.random.random() < 0.2:  # what a step gives stands before the state goes on
            lines[-2], lines[-1] = lines[-1], lines[-2]
        text = [*before, f"for i in {self.random.choice(ORDERS)}:", *(f"    {line}" for line in lines)]
        return "\n".join([*text, f"x = {self.random.choice(AFTER)}"])


def draw(seed: int, most: int) -> Program:
    """A program of at most so many loops."""
    return DrawingLoops(seed).program(most)
