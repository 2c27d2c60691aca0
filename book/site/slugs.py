"The places of headings on the site."


def as_in_jupyterlab(heading: str) -> str:
    "The place of a heading, as JupyterLab names it: its text, with a hyphen for each space."
    return heading.replace(" ", "-")
