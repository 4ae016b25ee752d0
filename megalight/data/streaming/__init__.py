"""Data sets that are streamed from the Hugging Face Hub or a folder, and tokenized on the fly."""
