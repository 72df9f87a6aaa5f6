"""The anatomy of an update: what the optimizer steps on one kept rollout do to ratios, tokens, gradients and entropy.

`analyze.py` has the commands; each function here takes a rollout that train.py --save_rollouts kept, with any Hugging Face
model, and returns plain numbers.
"""

import math
import statistics
from dataclasses import dataclass, replace

import torch

import losses
import parallel
import policy
from losses import AXES, METHODS, Method, call, cells, every_token, gradient_mass, group_advantages, objective_of, ppo_clip, resolve, row
from sampler import seed_of

LOW, HIGH = 0.2, 0.8  # ACPO's low- and high-probability tokens


@dataclass
class Kept:
    """A rollout of --save_rollouts, and the policy that its steps are taken with again."""

    batch: policy.Batch
    rewards: torch.Tensor  # [P, G]
    state: dict
    flags: dict
    method: Method
    hp: dict
    policy: policy.Policy
    number: int
    coefficients: dict  # of losses.policy_loss and the entropy bonus, as the run had them

    def use(self, method, hp):
        """Another method from here on: its advantages on the same completions."""
        self.method, self.hp = method, hp
        values = group_advantages(method, self.rewards, dict(self.state), **hp)  # [P, G]
        self.batch.advantages = values.view(-1, 1).expand(self.batch.mask.shape)
        return values

    def tokens(self, rows=None):
        """The Tokens of the rollout, or of some of its rows, at the policy as it is."""
        batch = self.batch if rows is None else self.batch.rows(rows)
        return batch.tokens(*policy.score(self.policy, batch))


def open_rollout(path, model=None):
    """Raises OSError, ValueError, KeyError and pickle's errors for a file that is no rollout, or that teaches nothing, or a model
    that cannot be loaded."""
    saved = torch.load(path, map_location=parallel.device(), weights_only=False)
    flags, batch = saved["flags"], policy.Batch(**saved["batch"])
    if flags["lora_rank"]:
        raise ValueError("its run trained adapters (--lora_rank), which are not kept with a rollout")
    chosen = policy.load(model or flags["model"], None, batch.rows(torch.arange(4) % len(batch.ids)), temperature=flags["temperature"],
                         budget=flags["tokens_per_micro_batch"], dtype=flags["dtype"])
    kept = Kept(batch, saved["rewards"], saved["state"], flags, None, None, chosen, saved["rollout"],
                {name: flags[name] for name in ("entropy_coef", "tis_cap", "kl_coef")})
    if not kept.use(row(flags["loss"], **{axis: flags[axis] for axis in AXES}), saved["hp"]).any():
        raise ValueError("no completion of this rollout has an advantage: each group is solved as a whole, or not at all")
    return kept


def walk(kept, steps=None, lr=None, optimizer=torch.optim.AdamW):
    """Takes the run's optimizer steps on the rollout again, AdamW's moments from 0: yields (steps taken, rows of the next step, its
    pass), the rows None after the last. Raises ValueError for a number of steps that does not divide the completions."""
    flags, count, passes = kept.flags, steps or kept.flags["steps_per_rollout"], kept.method.passes
    if len(kept.batch.ids) % count:
        raise ValueError(f"its {len(kept.batch.ids)} completions do not divide into {count} steps")
    optimizer = optimizer(kept.policy.parameters(), lr=lr or flags["lr"], weight_decay=flags["weight_decay"], fused=True)
    per_rollout = flags["steps_per_rollout"] * len(passes)
    factor, began = policy.lr_factor(flags["warmup"], flags["schedule"], flags["rollouts"] * per_rollout), (kept.number - 1) * per_rollout
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(began + step))
    shuffle = torch.Generator().manual_seed(seed_of("shuffle", flags["seed"], kept.number))
    shares = torch.randperm(len(kept.batch.ids), generator=shuffle).to(parallel.device()).chunk(count)
    plan = [(only, share) for only in passes for share in shares if kept.batch.mask[share].any()]
    for taken, (only, share) in enumerate(plan):
        yield taken, share, only
        optimizer.zero_grad()
        policy.backward(kept.policy, kept.batch.rows(share), kept.method, kept.hp, flags["max_tokens"], only, **kept.coefficients)
        torch.nn.utils.clip_grad_norm_(kept.policy.parameters(), flags["max_grad_norm"])
        optimizer.step()
        schedule.step()
    yield len(plan), None, every_token


# ---------------------------------------------------------------------------- step by step


def spread(tokens, bins=20):
    """[(log(1 - pi), log std(rho))] of `bins` equally large groups of tokens by pi_old; Lemma 1 of ACPO: a line of slope 2.

    Tokens with 1 - pi below 1e-4 are left out: their log probability is all rounding in float32."""
    left = -tokens.old_logprobs[tokens.mask].double().expm1()
    ratio, left = tokens.ratio[tokens.mask][left > 1e-4].double(), left[left > 1e-4]
    groups = [part for part in left.argsort().chunk(bins) if len(part) > 1]
    points = [(left[part].mean().log().item(), ratio[part].std().log().item()) for part in groups]
    return [p for p in points if math.isfinite(p[1])]


def slope(points):
    """Least squares."""
    mx, my = (sum(column) / len(points) for column in zip(*points))
    return sum((x - mx) * (y - my) for x, y in points) / sum((x - mx) ** 2 for x, _ in points)


def pull(tokens, method, hp):
    """|d loss / d log pi| of each token, 0 where the objective clips, [B, T]: |A| times the weight of ACPO's gradient."""
    leaf = replace(tokens, logprobs=tokens.logprobs.detach().requires_grad_())
    return torch.autograd.grad(objective_of(method, hp, leaf)[0].sum(), leaf.logprobs)[0].abs() * tokens.mask


def gradient_size(tokens, method, hp, only=every_token):
    """|G| = (1 - pi) |d loss / d log pi| (ACPO, sec. 2.3), times what the method selects, [B, T]."""
    return (1 - tokens.probs) * pull(tokens, method, hp) * call(method.select, hp, tokens) * call(only, hp, tokens)


def dominance(tokens, method, hp):
    """Mean and share of |G| of low- and high-probability tokens."""
    size, probs = gradient_size(tokens, method, hp)[tokens.mask], tokens.probs[tokens.mask]
    sides = dict(low=probs <= LOW, high=probs > HIGH)
    return {name: dict(mean=size[side].mean().item(), share=(size[side].sum() / size.sum()).item()) for name, side in sides.items()}


def token_table(tokens, method, hp, only=every_token, bins=5):
    """For probability bin x sign of the advantage: tokens, the share that the objective clips, its mean weight on log pi over |A|,
    and the share of |G|."""
    weight, size = pull(tokens, method, hp)[tokens.mask], gradient_size(tokens, method, hp, only)[tokens.mask]
    advantage, probs = tokens.advantages[tokens.mask], tokens.probs[tokens.mask]
    bin_of, table = (probs * bins).long().clamp(max=bins - 1), []
    for sign in (-1, 1):
        for i in range(bins):
            here = (bin_of == i) & (advantage.sign() == sign)
            n = int(here.sum())
            table.append(dict(sign=sign, bin=i, tokens=n, gradient=(size[here].sum() / size.sum().clamp(min=1e-12)).item(),
                              clipped=(weight[here] == 0).float().mean().item() if n else None,
                              weight=(weight[here] / advantage[here].abs()).mean().item() if n else None))
    return table


def steps(kept, count=None, lr=None, optimizer=torch.optim.AdamW, at=(1, 2, 4, 8, 16, 32, 64)):
    """Ratios, gradient sizes and clipping along the optimizer steps on one rollout."""
    told = dict(spread={}, slope={}, dominance={}, tables=[], ratios={})
    for taken, rows, only in walk(kept, count, lr, optimizer):
        if rows is not None:
            told["tables"].append(token_table(kept.tokens(rows), kept.method, kept.hp, only))
        if taken in at or taken == 0 or rows is None:
            tokens = kept.tokens()
            told["dominance"][taken] = dominance(tokens, kept.method, kept.hp)
            if taken:
                told["spread"][taken] = spread(tokens)
                told["slope"][taken] = slope(told["spread"][taken])
            last = tokens
    probs, ratio = last.old_logprobs.exp()[last.mask], last.ratio[last.mask]
    edges = torch.linspace(0.5, 1.5, 51)
    for name, side in dict(low=probs <= LOW, high=probs > HIGH).items():
        inside = torch.histc(ratio[side].clamp(0.5, 1.5).cpu(), 50, 0.5, 1.5)
        told["ratios"][name] = dict(density=(inside / inside.sum() * 50).tolist(), edges=edges.tolist(), std=ratio[side].std().item())
    return told


# ---------------------------------------------------------------------------- size and direction


def subsets(kept):
    """{name: (method, hyperparameters, tokens -> weight, are ratios 1)}: the gradients compared, the full one first."""
    method, hp = kept.method, kept.hp
    entropy = kept.tokens().entropy[kept.batch.mask]
    high_entropy = entropy.sort(descending=True).values[math.ceil(0.2 * len(entropy)) - 1].item()

    def tokens_with(test):
        return method, hp, lambda tokens: test(tokens).to(tokens.entropy), False

    def objective(f, **changes):
        other = replace(method, objective=f, preset={})
        return other, {**resolve(other, {k: v for k, v in hp.items() if k in other.flags})[1], **changes}, every_token, False
    return {
        "full": (method, hp, every_token, False),
        f"pi < {LOW}": tokens_with(lambda t: t.probs < LOW),
        f"{LOW} <= pi <= {HIGH}": tokens_with(lambda t: (t.probs >= LOW) & (t.probs <= HIGH)),
        f"pi > {HIGH}": tokens_with(lambda t: t.probs > HIGH),
        "top 20% entropy": tokens_with(lambda t: t.entropy >= high_entropy),
        "A > 0": tokens_with(lambda t: t.advantages > 0),
        "A < 0": tokens_with(lambda t: t.advantages < 0),
        "clip-higher": objective(ppo_clip, eps_low=0.2, eps_high=0.3, dual_clip=None),
        "no clip": objective(ppo_clip, eps_low=math.inf, eps_high=math.inf, dual_clip=None),
        "cispo": objective(losses.cispo, ratio_max=5.0),
        "on-policy": (method, hp, every_token, True)}


def sampled_matrices(model, layers):
    """{name: parameter} of the weight matrices of at most `layers` blocks, evenly over the depth."""
    blocks = policy.layers_of(model)
    chosen = {id(p) for i in range(min(layers, len(blocks))) for p in blocks[round(i * (len(blocks) - 1) / max(1, min(layers, len(blocks)) - 1))].parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in chosen and p.dim() == 2}


def right_subspace(matrix, k):
    """The top-k right singular vectors [k, n]; k None: 128, or an eighth of a smaller matrix (all of it would be the whole space)."""
    k = k or min(128, max(1, min(matrix.shape) // 8))
    return torch.linalg.svd(matrix.double(), full_matrices=False).Vh[:k]


def angle(a, b):
    """Mean principal angle in degrees between subspaces given by orthonormal rows."""
    return torch.linalg.svdvals(a @ b.T).clamp(max=1).acos().mean().item() * 180 / math.pi


def gradients(kept, layers=8, k=None, after=None, lr=None):
    """After `after` steps of the run (default half of them): each subset's gradient norm over the full one's, and the mean
    principal angle to it, per weight matrix and overall. sum_error: how far the three probability subsets are from adding up to
    the full gradient, relative to it, largest over the matrices."""
    total = len(kept.method.passes) * kept.flags["steps_per_rollout"]
    after = total // 2 if after is None else after
    if not 0 <= after <= total:
        raise ValueError(f"--steps {after}: its run took {total}")
    next(taken for taken, *_ in walk(kept, lr=lr) if taken == after)
    matrices = sampled_matrices(kept.policy.model, layers)
    for p in kept.policy.parameters():
        p.requires_grad_(False)
    for p in matrices.values():
        p.requires_grad_(True)
    here, behind = policy.score(kept.policy, kept.batch)[0], kept.batch.old_logprobs
    told, full = {}, None
    for name, (method, hp, only, on_policy) in subsets(kept).items():
        kept.policy.zero_grad()
        kept.batch.old_logprobs = here if on_policy else behind
        policy.backward(kept.policy, kept.batch, method, hp, kept.flags["max_tokens"], only, **kept.coefficients)
        found = {n: p.grad.detach().clone() for n, p in matrices.items()}
        if full is None:
            full, rest = found, {n: g.clone() for n, g in found.items()}
            space = {n: right_subspace(g, k) for n, g in full.items()}
            size = {n: g.norm(dtype=torch.float64) for n, g in full.items()}
        if " pi " in f" {name} ":  # the three parts of all tokens
            rest = {n: g - found[n] for n, g in rest.items()}
        per = {n: dict(norm=(g.norm(dtype=torch.float64) / size[n]).item(), angle=angle(right_subspace(g, k), space[n]) if g.any() else math.nan)
               for n, g in found.items()}
        norm = math.sqrt(sum(g.norm(dtype=torch.float64).item() ** 2 for g in found.values()) / sum(s.item() ** 2 for s in size.values()))
        told[name] = dict(norm=norm, angle=sum(v["angle"] for v in per.values()) / len(per), matrices=per)
    kept.batch.old_logprobs = behind
    error = max((g.norm(dtype=torch.float64) / size[n]).item() for n, g in rest.items())
    return dict(after=after, subsets=told, sum_error=error)


# ---------------------------------------------------------------------------- entropy


def entropy_changes(kept, lr=None):
    """For every advantage: FADE's prediction of the rollout's entropy change, up to a factor, against what the steps do.

    predicted: (m_S - m_F) H - Cov(A, log pi) over the completion tokens (FADE); covariance: -Cov(A, log pi) alone (arXiv 2505.22617);
    reversed: with the other sign of the first term, by which mass on successes costs entropy; measured: nats, over the same prefixes, after the steps of `constant | ppo_clip` on each advantage."""
    start, told, kept.coefficients = [p.detach().clone() for p in kept.policy.parameters()], {}, {}
    tried = {name: (f, {}) for name, f in cells("advantage").items()}
    tried.update({f"asym, delta {d:g}": (losses.asym, dict(delta=d)) for d in (0.25, 0.5, 4)})
    for name, (f, given) in tried.items():
        method, hp = resolve(Method(f, ppo_clip, row("dr_grpo").aggregate), given)
        with torch.no_grad():
            for p, value in zip(kept.policy.parameters(), start):
                p.copy_(value)
        try:
            kept.use(method, hp)
        except ValueError as e:
            print(f"{name} is left out: {e}")
            continue
        before = kept.tokens()
        a, logp = before.advantages[before.mask].double(), before.logprobs[before.mask].double()
        pos, neg = gradient_mass(a)
        h = before.entropy[before.mask].mean().item()
        for _ in walk(kept, lr=lr):
            pass
        covariance = ((a - a.mean()) * (logp - logp.mean())).mean().item()
        # AdamW's steps have one size whatever the scale of A: so has the prediction
        scale = a.abs().mean().item()
        told[name] = dict(mass_pos=pos, mass_neg=neg, predicted=((pos - neg) * h - covariance) / scale, covariance=-covariance / scale,
                          reversed=(-(pos - neg) * h - covariance) / scale, measured=kept.tokens().entropy[before.mask].mean().item() - h)
    return dict(advantages=told, **{f"correlation_{k}": correlation([(v[k], v["measured"]) for v in told.values()]) for k in ("predicted", "covariance", "reversed")})


def correlation(points):
    return torch.corrcoef(torch.tensor(points, dtype=torch.float64).T)[0, 1].item()


# ---------------------------------------------------------------------------- ACPO's Proposition 1


def expected_gradient(s, low, high, eq=53):
    """E[rho A 1(not clipped)] sqrt(2 pi) / sigma_A, ratios of std s: ACPO's eq. 53, or eq. 56's Phi(-e_l / s) in place of Phi(e_l / s)."""
    def phi(x):
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def cdf(x):
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))
    return cdf(high / s) - cdf(low / s if eq == 53 else -low / s) - s * (phi(high / s) + phi(low / s))


def monte_carlo(s, low, high, n=10**6, seed=0):
    """The same by the proposition's assumptions, A ~ N(0, 1) and rho ~ N(1, s^2) independent: mean and standard error; and the
    mean of |rho A| 1(not clipped), which the paper's reading of it is about."""
    g = torch.Generator().manual_seed(seed)
    a, rho = torch.randn(n, generator=g, dtype=torch.float64), 1 + s * torch.randn(n, generator=g, dtype=torch.float64)
    kept = torch.where(a > 0, rho <= 1 + high, rho >= 1 - low)
    values = rho * a * kept * math.sqrt(2 * math.pi)
    return values.mean().item(), (values.std() / n**0.5).item(), (rho * a * kept).abs().mean().item()


def tabular_slope(n=4000, vocabulary=50, lr=1e-3, seed=0):
    """Lemma 1 where each token has logits of its own and takes one policy-gradient step on its own advantage, A ~ N(0, 1), 100 of
    them each: the slope of log std(rho) on log(1 - pi). The change of log pi is |e - pi|^2 = (1 - pi)^2 + the other pi_j^2; the
    lemma has the first term alone."""
    g = torch.Generator().manual_seed(seed)
    logits = 4 * torch.rand(n, 1, generator=g, dtype=torch.float64) * torch.randn(n, vocabulary, generator=g, dtype=torch.float64)
    logp = logits.log_softmax(-1)
    token = torch.multinomial(logp.exp(), 1, generator=g)
    pi = logp.gather(-1, token).exp()
    own = (1 - pi)[:, 0] ** 2 + (logp.exp() ** 2).sum(-1) - pi[:, 0] ** 2  # |e - pi|^2, d log pi per unit of lr A
    rho = (lr * torch.randn(n, 100, generator=g, dtype=torch.float64) * own[:, None]).exp()
    left = 1 - pi[:, 0]
    return slope([(left[part].mean().log().item(), rho[part].std().log().item()) for part in left.argsort().chunk(20) if left[part].mean() > 1e-4])


def theory(low=0.2, high=0.2):
    lines = []
    for s in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6):
        mean, error, size = monte_carlo(s, low, high)
        lines.append(dict(s=s, monte_carlo=mean, error=error, eq53=expected_gradient(s, low, high), eq56=expected_gradient(s, low, high, 56), size=size))
    return lines


# ---------------------------------------------------------------------------- every method on one rollout


def replay(kept, names):
    """The gradients of the methods on the rollout, all of it as one optimizer step: loss, gradient norm, clip fraction of each (its
    flags at their defaults, the run's own method with the run's), and the cosine between every two. At a checkpoint before the
    rollout was learnt from ratios are 1, a later one spreads them."""
    own, gradient, told = (kept.flags["loss"], kept.method, kept.hp), {}, {}
    for name in names:
        method, hp = own[1:] if name == own[0] else (METHODS[name], METHODS[name].flags)
        try:
            kept.use(method, hp)
        except ValueError as e:
            print(f"{name} is left out: {e}")
            continue
        kept.policy.zero_grad()
        passes = [policy.backward(kept.policy, kept.batch, method, hp, kept.flags["max_tokens"], only, **(kept.coefficients if name == own[0] else {}))
                  for only in method.passes]
        gradient[name] = torch.cat([p.grad.flatten().cpu() for p in kept.policy.parameters()])
        told[name] = dict(loss=sum(t["loss"].item() for t in passes), grad_norm=gradient[name].norm().item(),
                          **{k: statistics.mean(t[k].item() for t in passes) for k in ("clip_frac", "approx_kl", "ess")})

    def dot(a, b):  # a float32 sum over all parameters is off by 1e-4 and more
        return (gradient[a] * gradient[b]).sum(dtype=torch.float64)
    return dict(methods=told, cosine=[[(dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()).item() for b in told] for a in told])


# ---------------------------------------------------------------------------- commands of analyze.py


def on_rollout(f):
    """args -> what f tells of the rollout in args.paths[0], with what it is of."""
    def command(args):
        kept = open_rollout(args.paths[0], args.model)
        about = dict(rollout=kept.number, method=kept.flags["loss"], lr=args.lr or kept.flags["lr"])
        return {**about, **f(kept, args)}
    return command


COMMANDS = dict(
    steps=on_rollout(lambda kept, args: steps(kept, args.steps, args.lr)),
    subsets=on_rollout(lambda kept, args: gradients(kept, args.layers or 8, args.k, args.steps, args.lr)),
    entropy=on_rollout(lambda kept, args: entropy_changes(kept, args.lr)),
    replay=on_rollout(lambda kept, args: replay(kept, args.methods.split(",") if args.methods else METHODS)),
    theory=lambda args: theory())


def text(what, told):
    """What a command found, as a Markdown table."""
    def lines(head, rows):
        return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|"] + [
            "| " + " | ".join(x if isinstance(x, str) else f"{x:.4g}" for x in line) + " |" for line in rows])
    if what == "steps":
        sides = [(t, *(told["dominance"][t][side][k] for k in ("mean", "share") for side in ("low", "high"))) for t in told["dominance"]]
        return lines(("steps taken", "slope", "mean abs G, pi <= 0.2", "pi > 0.8", "share, pi <= 0.2", "pi > 0.8"),
                     [(str(t), told["slope"].get(t, "-"), *values) for t, *values in sides])
    if what == "subsets":
        return lines(("subset", "norm", "angle"), [(n, v["norm"], v["angle"]) for n, v in told["subsets"].items()]) + (
            f"\nthe three parts by probability add up to the full gradient to {told['sum_error']:.1g}")
    if what == "entropy":
        return lines(("advantage", "predicted", "-Cov", "reversed", "measured"), [
            (n, v["predicted"], v["covariance"], v["reversed"], v["measured"]) for n, v in told["advantages"].items()]) + (
            f"\ncorrelation with what is measured: {told['correlation_predicted']:.2f}, {told['correlation_covariance']:.2f}, {told['correlation_reversed']:.2f}")
    if what == "replay":
        return lines(("method", "loss", "gradient norm", "clipped", "KL", "ess"), [(n, *v.values()) for n, v in told["methods"].items()])
    return lines(("s", "Monte Carlo", "standard error", "eq. 53", "eq. 56", "mean abs"), [line.values() for line in told])
