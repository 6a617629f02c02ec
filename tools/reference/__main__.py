"""``python -m tools.reference``."""

from tools.reference.pages import ROOT, pages


def main() -> None:
    """Write the pages."""
    for name, text in pages().items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
