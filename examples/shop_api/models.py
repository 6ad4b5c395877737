"""The orders, in the database in which requests and tasks are recorded too.

`python -m examples.shop_api.models` makes their table and that of the records.
"""

import os
from datetime import datetime

from sqlalchemy import DateTime, create_engine, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_idempotent import open_store

URL = os.environ.get("DATABASE_URL", "postgresql://localhost/shop")

engine = create_engine(URL.replace("postgresql://", "postgresql+psycopg://"))


class Base(DeclarativeBase):
    pass


class Order(Base):
    """An order. It is charged once it has a receipt."""

    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(primary_key=True)
    account: Mapped[str]
    item: Mapped[str]
    cents: Mapped[int]
    receipt: Mapped[str | None]
    placed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


if __name__ == "__main__":
    Base.metadata.create_all(engine)
    open_store(URL).apply_schema()
