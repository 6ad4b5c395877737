"""The server: an order that is sent again is placed once, and gets the first answer.

With Redis and PostgreSQL on localhost: `uvicorn examples.shop_api.api:api`
"""

from uuid import uuid4

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, PositiveInt
from sqlalchemy.orm import Session
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection

from celery_idempotent import current_lease
from celery_idempotent.http import IdempotencyMiddleware

from . import tasks
from .models import Order, engine

#: Stands for the check of a token: whose it is.
ACCOUNTS = {"token-of-anna": "anna", "token-of-ben": "ben"}


class BearerTokens(AuthenticationBackend):
    """Know the caller of each request by its token, and refuse those without."""

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser]:
        account = ACCOUNTS.get(conn.headers.get("Authorization", "").removeprefix("Bearer "))
        if account is None:
            raise AuthenticationError("Expected a known token in the header Authorization.")
        return AuthCredentials(), SimpleUser(account)


def refuse(conn: HTTPConnection, error: AuthenticationError) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 401, {"WWW-Authenticate": "Bearer"})


api = FastAPI(title="Shop")
# The last that is added is outermost: who is refused there gets no replay.
api.add_middleware(
    IdempotencyMiddleware,
    celery_app=tasks.app,  # whose store is the database of the orders
    name="shop",
    scope=lambda scope: scope["user"].username,
    required=True,
)
api.add_middleware(AuthenticationMiddleware, backend=BearerTokens(), on_error=refuse)


class NewOrder(BaseModel):
    item: str
    cents: PositiveInt


@api.post("/orders", status_code=202)
def place_order(new: NewOrder, request: Request) -> JSONResponse:
    """Place an order, which is charged soon."""
    order_id = str(uuid4())
    response = JSONResponse({"id": order_id, "status": "placed"}, 202, {"Location": f"/orders/{order_id}"})
    with Session(engine) as session:
        session.add(Order(id=order_id, account=request.user.username, item=new.item, cents=new.cents))
        current_lease().settle(response, using=session)
        session.commit()  # the order and the answer to it are there now, or neither
    # An order that no message follows is published by `publish_late`: nothing is lost if this server dies here.
    tasks.charge.delay(order_id, new.cents)
    return response


@api.get("/orders/{order_id}")
def read_order(order_id: str, request: Request) -> dict[str, object]:
    """Read an order of the caller's own."""
    with Session(engine) as session:
        order = session.get(Order, order_id)
    if order is None or order.account != request.user.username:
        raise HTTPException(404)
    return {"id": order.id, "item": order.item, "status": "charged" if order.receipt else "placed"}
