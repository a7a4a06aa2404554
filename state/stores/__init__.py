"""Where objects are kept: a folder, S3, Google Cloud Storage, Azure Blob Storage."""
