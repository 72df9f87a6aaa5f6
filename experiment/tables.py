"""Tables in Markdown."""


def markdown_table(head, rows):
    """head: the columns' titles. rows: lists of cells, in which numbers are formatted already."""
    lines = [head, *rows]
    texts = ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
    return "\n".join([texts[0], "|---" * len(head) + "|", *texts[1:]])
