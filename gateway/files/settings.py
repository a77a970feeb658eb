"""Where files are, as processes are told."""

from importlib.util import find_spec
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from penstock.gateway.files.disk_texts import DiskTexts
from penstock.gateway.files.storage import FileStorage, FolderStorage, ObjectStorage
from penstock.schemas.network.object_store import OBJECT_URL
from penstock.schemas.process.start import Settings


class StorageSettings(Settings):
    """The settings of where files are."""

    files_folder: Path | None = Field(
        None, description="shared by gateways and housekeeping; none: no files, no batches"
    )
    files_url: str | None = Field(
        None,
        pattern=OBJECT_URL,
        description="where finished files are instead, as s3://bucket/prefix",
    )

    @field_validator("files_url")
    @classmethod
    def has_what_it_needs(cls, url: str | None, context: ValidationInfo) -> str | None:
        if url is not None and context.data.get("files_folder") is None:
            raise ValueError("give --files-folder too, for what is being made")
        if url is not None and find_spec("obstore") is None:
            raise ValueError("needs a package: pip install 'penstock[objects]'")
        return url


def storage_of(settings: StorageSettings) -> FileStorage | None:
    """Return the storage of these settings, if they name one. Its folder is there then."""
    if settings.files_folder is None:
        return None
    settings.files_folder.mkdir(parents=True, exist_ok=True)
    if settings.files_url is not None:
        return ObjectStorage(settings.files_url)
    return FolderStorage(settings.files_folder)


def disk_texts_of(settings: StorageSettings) -> DiskTexts | None:
    """Return the texts that are in the storage of these settings, if they name one."""
    storage, folder = storage_of(settings), settings.files_folder
    return DiskTexts(storage, folder) if storage is not None and folder is not None else None
