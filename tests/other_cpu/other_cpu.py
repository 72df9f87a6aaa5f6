"""Another CPU, pretended: torch's sums run in another order.

    PYTHONPATH=$PWD/tests/other_cpu ./run_all.sh test      or before any other command

`import torch` calls pretend(), in subprocesses as well: it calls the entry points torch.backends of
all packages on sys.path. Each result is one that some CPU could give, since a sum of floats depends
on the order that instructions and libraries choose: sums without rounding stay what they are. The
order goes by shapes and strides, so equal calls have equal bits, and calls of other batch sizes or
layouts have others. A test that fails here asks for the bits of one machine."""

import warnings
import zlib

KEPT = []  # the kernels are replaced as long as this object lives


def pretend():
    import torch

    library = torch.library.Library("aten", "IMPL")
    KEPT.append(library)
    wide = torch.float32, torch.float64  # 16 bits are summed in 32, and rounded once

    def replace(name, kernel):
        """Calls kernel(the CPU's kernel of the operation, *its arguments) instead."""
        stock = torch.library.get_kernel(f"aten::{name}", "CPU")

        def call(keys, *args, **kwargs):
            return kernel(lambda *a, **k: stock.call_boxed(keys, *a, **k), *args, **kwargs)
        with warnings.catch_warnings(action="ignore"):  # of replaced kernels
            library.impl(name, call, "CPU", with_keyset=True)

    def rotated(stock, *args, **factors):
        """A product c + a b, [.., n] [n, ..]: the sums begin at another place than the first."""
        *c, a, b = args
        n = a.shape[-1]
        if n < 2 or a.dtype not in wide:
            return stock(*args, **factors)
        shapes = repr((a.shape, b.shape, a.stride(), b.stride()))
        start = 1 + zlib.crc32(shapes.encode()) % (n - 1)
        out = stock(*c, a[..., start:], b[..., start:, :], **factors)
        add = out.addmm_ if a.dim() == 2 else out.baddbmm_
        return add(a[..., :start], b[..., :start, :], alpha=factors.get("alpha", 1))

    def backwards(stock, x, dims, *rest, **options):
        """A sum or a mean, from the last element to the first."""
        if x.dtype in wide:
            x = x.flip(dims or [*range(x.dim())])
        return stock(x, dims, *rest, **options)

    def flipped(stock, x, dim, *rest):
        """A softmax whose sum runs from the last element to the first."""
        return stock(x.flip(dim), dim, *rest).flip(dim)

    def attention(stock, query, key, *rest, **options):
        """Products of queries and keys are sums from the last element to the first."""
        return stock(query.flip(-1), key.flip(-1), *rest, **options)

    def attention_backward(stock, gradient, query, key, *rest, **options):
        of_query, of_key, of_value = stock(gradient, query.flip(-1), key.flip(-1), *rest, **options)
        return of_query.flip(-1), of_key.flip(-1), of_value

    def inverted(stock, x):
        """exp x = 1 / exp(-x), to 1.5 units in the last place."""
        return stock(-x).reciprocal_() if x.dtype in wide else stock(x)

    for name in ("mm", "addmm", "bmm", "baddbmm"):
        replace(name, rotated)
    for name in ("sum.dim_IntList", "mean.dim"):
        replace(name, backwards)
    for name in ("_softmax", "_log_softmax"):
        replace(name, flipped)
    replace("_scaled_dot_product_flash_attention_for_cpu", attention)
    replace("_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward)
    replace("exp", inverted)
